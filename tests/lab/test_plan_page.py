"""The plan's page in a real headless browser: drawn, quiet, in agreement with the plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.planner import Plan, StepWork, page, plan
from paceline.planner.noise import NoiseScale
from tests.lab.browser import PHONE, Loaded, launched, needs_browser, opened

pytestmark = [needs_browser, pytest.mark.slow]
HOSTILE = "<b>train</b>.py"


@pytest.fixture(scope="module")
def found() -> Plan:
    hosts = Hosts(count=24, bandwidth_gbit_per_s=1.0)
    cluster = Cluster(about="<i>hosts</i>", hosts=(hosts,), compute=Compute(step_s=0.1))
    return plan(cluster, StepWork(tensor_bytes=(4_000_000,), samples=32), noise=NoiseScale(500.0), num_checks=1)


@pytest.fixture(scope="module")
def loaded(found: Plan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    path.write_text(page.render(found, script=HOSTILE, cluster="made"), encoding="utf-8")
    with launched() as browser, opened(browser, path, size=PHONE) as opened_page:
        yield opened_page


def test_every_curve_is_drawn_with_titled_axes(loaded: Loaded) -> None:
    plots = loaded.page.locator(".plot").evaluate_all(
        """plots => plots.map(plot => ({
            id: plot.id,
            lines: plot.querySelectorAll(".trace path.js-line").length,
            x: plot.querySelector(".xtitle")?.textContent ?? "",
            y: plot.querySelector(".ytitle")?.textContent ?? "",
        }))"""
    )
    assert [plot["id"] for plot in plots] == ["step", "rate", "busiest", "target"]
    for plot in plots:
        assert plot["lines"] >= 5, plot
        assert plot["x"] == "Workers (number)"
        assert "(" in plot["y"], plot  # its unit


def test_curves_are_the_plan_s(loaded: Loaded, found: Plan) -> None:
    drawn = loaded.page.evaluate(
        "document.getElementById('rate').data.find(t => t.name.split(' = ').includes('all-reduce')).y"
    )
    points = [point for point in found.points if point.label == "all-reduce"]
    assert drawn == pytest.approx([point.prediction.samples_per_s for point in points])
    marked = loaded.page.locator(".summary tr.best th, .summary tr.best td").all_inner_texts()
    assert marked[:2] == [found.best.label, str(found.best.prediction.workers)]


def test_it_is_quiet_and_takes_nothing_as_markup(loaded: Loaded) -> None:
    assert loaded.complaints == []
    assert loaded.requests == []
    assert loaded.page.locator("h1").inner_text() == f"{HOSTILE} on made"
    assert "<i>hosts</i>" in loaded.page.locator(".context").inner_text()
    assert loaded.page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
