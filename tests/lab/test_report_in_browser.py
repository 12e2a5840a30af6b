"""The report in a real headless browser: drawn, quiet, in agreement with the tables, fit for a phone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from playwright.sync_api import Browser

from paceline.lab import report_page
from tests.lab import example_study, saved_study
from tests.lab.browser import PHONE, Loaded, launched, needs_browser, opened

pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with a failed trial whose reason is hostile, and one that never reached the target; and its report."""
    place = tmp_path_factory.mktemp("studies") / "digits"
    saved_study.save(place)
    report_page.write([place], place / "report.html")
    return place


@pytest.fixture(scope="module")
def loaded(browser: Browser, directory: Path) -> Iterator[Loaded]:
    with opened(browser, directory / "report.html") as found:
        yield found


@pytest.fixture(scope="module")
def summary(directory: Path) -> pd.DataFrame:
    return pd.read_csv(directory / "tables" / "summary.csv")


def test_every_figure_is_drawn_with_titled_axes(loaded: Loaded) -> None:
    plots = loaded.page.locator(".plot").evaluate_all(
        """plots => plots.map(plot => ({
            id: plot.id,
            drawn: plot.querySelectorAll(".trace path, .point path").length,
            x: plot.querySelector(".xtitle")?.textContent ?? "",
            y: plot.querySelector(".ytitle")?.textContent ?? "",
            label: plot.getAttribute("aria-label"),
        }))"""
    )
    kinds = {re.sub(r"-\d+$", "", plot["id"]) for plot in plots}
    assert kinds == {
        "time-to-target", "speed-up", "convergence", "training", "iteration-rate", "synchrony", "traffic", "efficiency",
        "cost", "shares", "per-worker", "staleness",
    }  # fmt: skip
    for plot in plots:
        assert plot["drawn"] > 0, plot
        assert plot["x"], plot
        assert plot["y"], plot
        assert len(plot["label"]) > 40, plot


def test_it_says_nothing_on_the_console_and_asks_the_network_for_nothing(loaded: Loaded) -> None:
    assert loaded.complaints == []
    assert loaded.requests == []


def test_the_answer_and_the_table_agree_with_the_csv(loaded: Loaded, summary: pd.DataFrame) -> None:
    fastest = summary.loc[summary["time_to_target_s"].idxmin()]
    answer = loaded.page.locator(".answer .first").inner_text()
    assert f"{fastest['strategy']} on {fastest['workers']} workers" in answer
    number = r"([\d.]+)"
    said = re.search(rf": {number} s, {number} times one worker \({number} to {number}\)", answer)
    assert said is not None, answer
    known = [fastest[name] for name in ("time_to_target_s", "speedup", "speedup_low", "speedup_high")]
    assert [float(text) for text in said.groups()] == pytest.approx(known, rel=0.02)
    marked = loaded.page.locator(".summary tr.best th, .summary tr.best td").all_inner_texts()
    assert marked[:2] == [fastest["strategy"], str(fastest["workers"])]
    times = loaded.page.locator(".summary tbody tr td:nth-child(3)").all_inner_texts()
    for text, (_, row) in zip(times, summary.iterrows(), strict=True):
        if row["reached"] == 0:
            assert text == "never"
        else:
            assert float(text.split()[0]) == pytest.approx(row["time_to_target_s"], rel=0.006)


def test_marks_lie_where_the_csv_says_and_never_reached_has_none(loaded: Loaded, directory: Path) -> None:
    traces = loaded.page.evaluate(
        "document.getElementById('time-to-target-1').data.filter(t => t.error_x).map(t => [t.y, t.x])"
    )
    drawn = {label.removeprefix("≈ "): x for labels, xs in traces for label, x in zip(labels, xs, strict=True)}
    compared = pd.read_csv(directory / "tables" / "comparison.csv")
    compared = compared[compared["quantity"] == "time_to_target_s"]
    assert drawn == pytest.approx({f"{row.strategy} × {row.workers}": row.typical for row in compared.itertuples()})
    assert "never reached" in loaded.page.locator("#time-to-target-1").inner_text()


def test_half_of_the_figures_are_folded_away(browser: Browser, directory: Path) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto((directory / "report.html").resolve().as_uri())
    page.wait_for_selector("html[data-drawn]")
    shown, all_plots = int(page.locator("html").get_attribute("data-drawn") or 0), page.locator(".plot").count()
    assert 0 < shown <= 0.6 * all_plots
    page.locator("nav a", has_text="Staleness").click()
    page.wait_for_function(f"document.documentElement.dataset.drawn == {all_plots}")
    context.close()


def test_what_is_hostile_is_shown_as_text(loaded: Loaded) -> None:
    reason = loaded.page.locator(".failures dd").first
    assert reason.inner_text() == example_study.HOSTILE
    assert reason.locator("*").count() == 0
    assert loaded.page.title() == "train.py --lr 0.0001"


@pytest.mark.parametrize(("kind", "signature"), [("svg", b"<svg"), ("png", b"\x89PNG")])
def test_a_figure_can_be_downloaded(loaded: Loaded, kind: str, signature: bytes) -> None:
    with loaded.page.expect_download() as under_way:
        loaded.page.locator(f"#speed-up button[data-format={kind}]").click()
    assert under_way.value.suggested_filename == f"speed-up-1.{kind}"
    assert Path(under_way.value.path()).read_bytes().startswith(signature)
    assert loaded.complaints == []
    assert loaded.requests == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_scrolling_sideways_and_can_read_the_figures(
    browser: Browser, directory: Path, scheme: str
) -> None:
    with opened(browser, directory / "report.html", size=PHONE, scheme=scheme) as loaded:
        page = loaded.page
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
        rights = page.locator(".plot").evaluate_all("plots => plots.map(p => p.getBoundingClientRect().right)")
        assert max(rights) <= PHONE[0]
        areas = page.locator(".plot").evaluate_all("plots => plots.map(p => p._fullLayout._size).map(s => [s.w, s.h])")
        assert min(width for width, _ in areas) >= 120
        assert min(height for _, height in areas) >= 120
        ink = page.evaluate("getComputedStyle(document.querySelector('.xtitle')).fill")
        assert ink == {"light": "rgb(28, 30, 33)", "dark": "rgb(230, 232, 235)"}[scheme]
        assert loaded.complaints == []


def test_colours_follow_the_reader_and_print_is_light(browser: Browser, directory: Path) -> None:
    with opened(browser, directory / "report.html", scheme="dark") as loaded:
        ink = "getComputedStyle(document.querySelector('.xtitle')).fill"
        assert loaded.page.evaluate(ink) == "rgb(230, 232, 235)"
        loaded.page.emulate_media(media="print")
        _wait_for(lambda: loaded.page.evaluate(ink) == "rgb(28, 30, 33)")
        assert not loaded.page.locator("nav").is_visible()
        widths = loaded.page.locator(".plot").evaluate_all(
            "plots => plots.map(p => [p.offsetWidth, p._fullLayout.width])"
        )
        assert all(drawn <= room for room, drawn in widths)
        loaded.page.emulate_media(media="screen", color_scheme="dark")
        _wait_for(lambda: loaded.page.evaluate(ink) == "rgb(230, 232, 235)")


def _wait_for(holds: Callable[[], bool]) -> None:
    """Playwright's own waiting evaluates strings, which the page's content security policy forbids."""
    until_s = time.monotonic() + 300.0
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_names_in_figures_are_no_markup(browser: Browser, tmp_path: Path) -> None:
    frames = example_study.frames()
    name = "<b>ps</b> <img src=x onerror=alert(1)>"
    for frame in vars(frames).values():
        frame["strategy"] = frame["strategy"].replace("all-reduce", name)
    file = tmp_path / "report.html"
    file.write_text(report_page.render([report_page.Page("example", "train.py", frames, [], "", {})]), encoding="utf-8")
    with opened(browser, file) as loaded:
        legend = loaded.page.locator("#speed-up-1 .legendtext").all_text_contents()
        assert name in legend
        assert loaded.page.locator("figcaption").all_inner_texts().count(name) >= 3
        assert loaded.page.locator("img").count() == 0
        assert loaded.requests == []
        assert loaded.complaints == []


def test_two_studies_lie_side_by_side(browser: Browser, directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "virtual"
    saved_study.save(other, example_study.frames(study="virtual", engine="virtual", slowdown=0.5))
    out = tmp_path / "both.html"
    report_page.write([directory, other], out)
    with opened(browser, out) as loaded:
        left, right = (loaded.page.locator(f"#training-1-{place}") for place in (1, 2))
        assert left.bounding_box()["y"] == right.bounding_box()["y"]
        assert left.bounding_box()["x"] < right.bounding_box()["x"]
        assert left.locator(".xtitle").text_content() == "Training time (s)"
        assert right.locator(".xtitle").text_content() == (
            f"Training time (virtual s)simulated cluster {example_study.CLUSTER}"
        )
        said = loaded.page.locator("header .virtual").inner_text()
        assert f"virtual on the simulated cluster {example_study.CLUSTER}; digits on a real clock" in said
        assert loaded.complaints == []
