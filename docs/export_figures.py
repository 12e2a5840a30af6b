"""Figures of a study's report as SVG files, or several beside each other in one, in the report's light colours.

    python docs/export_figures.py docs/gallery/simulated-lab docs/figures/report.svg time-to-target-1 training-1

It needs a Chromium on the PATH, in which it opens the report as a reader does. Without names of figures
it lists them.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

from playwright.sync_api import sync_playwright

from paceline.lab import report_page
from paceline.lab.study import Study

_WIDTH, _HEIGHT = 560, 400
_DRAW = """async ([id, width, height]) => {
  const { data, layout } = document.getElementById(id);
  const margins = { ...layout, width, height, autosize: false, paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff" };
  return Plotly.toImage({ data, layout: margins }, { format: "svg", width, height });
}"""


def main() -> None:
    study, out, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "report.html"
        page_file.write_text(report_page.render([report_page.page_of(Study.open(study))]), encoding="utf-8")
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(color_scheme="light", viewport={"width": 1280, "height": 900})
        page.goto(page_file.as_uri())
        page.wait_for_selector("[data-drawn]", state="attached")
        if not names:
            print(*page.locator(".plot").evaluate_all("plots => plots.map(plot => plot.id)"), sep="\n")
            return
        page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
        for name in names:  # what was folded away is drawn only now
            page.wait_for_function("id => document.getElementById(id).data", arg=name)
        drawn = [unquote(page.evaluate(_DRAW, [name, _WIDTH, _HEIGHT]).partition(",")[2]) for name in names]
        browser.close()
    Path(out).write_text(_beside(drawn), encoding="utf-8")


def _beside(drawn: list[str]) -> str:
    """Nest the drawings; ids are made each drawing's own, since clip paths refer to them."""
    parts = []
    for number, svg in enumerate(drawn):
        own = re.sub(r'(id="|url\(\'?#|href="#)', rf"\g<1>f{number}-", svg)
        parts.append(own.replace("<svg ", f'<svg x="{number * _WIDTH}" ', 1))
    size = f'viewBox="0 0 {_WIDTH * len(drawn)} {_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    main()
