"""A real headless browser, where there is one, and what a loaded page did."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PATIENCE_MS = 300_000
_ALL_DRAWN = "document.documentElement.dataset.drawn == document.querySelectorAll('.plot').length"
DESKTOP, PHONE = (1280, 900), (390, 844)


def find_browser() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


needs_browser = pytest.mark.skipif(
    find_browser() is None, reason=f"no browser on the PATH: none of {', '.join(_NAMES)}"
)


@contextmanager
def launched() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Root, as which CI containers run, may not use Chromium's sandbox.
        browser = playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox"], timeout=_PATIENCE_MS
        )
        yield browser
        browser.close()


@dataclass
class Loaded:
    """An open page, and everything it said and asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def opened(browser: Browser, file: Path, *, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> Iterator[Loaded]:
    """The file once its figures are drawn, those that are folded away too.

    What it asks for beyond itself is written down and not answered.
    """
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(_PATIENCE_MS)
    loaded = Loaded(context.new_page())
    own = file.resolve().as_uri()

    def answer(route: Route) -> None:
        if route.request.url == own:
            route.continue_()
        else:
            loaded.requests.append(route.request.url)
            route.abort()

    loaded.page.route("**/*", answer)
    loaded.page.on("console", lambda said: loaded.complaints.append(f"{said.type}: {said.text}"))
    loaded.page.on("pageerror", lambda error: loaded.complaints.append(str(error)))
    loaded.page.goto(own)
    loaded.page.wait_for_selector("html[data-drawn]")
    loaded.page.evaluate("document.getElementById('more')?.setAttribute('open', '')")
    loaded.page.wait_for_function(_ALL_DRAWN)
    yield loaded
    context.close()
