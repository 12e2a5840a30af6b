"""The curves of a plan, in the style of the lab's figures."""

import math
from collections.abc import Callable
from typing import Any

import pandas as pd

from paceline.lab.figures.chart import Chart, canvas, curve, ideal
from paceline.lab.figures.style import Style, plain, strategy_styles
from paceline.lab.variant import Variant
from paceline.planner.search import Plan, Point

_HEIGHT_PX = 480  # of which a narrow screen's legend takes half
_MAX_CURVES = 8
_SAME = 0.005
"""Curves that nowhere differ by more are drawn as one: nobody would see the second."""


_CHARTS: tuple[tuple[str, str, str, Callable[[Point], float]], ...] = (
    ("step", "Time of a step", "Time of a step (ms)", lambda point: point.prediction.step_s * 1e3),
    ("rate", "Samples per second", "Samples (per s)", lambda point: point.prediction.samples_per_s),
    ("busiest", "How full the busiest link is", "Busy (% of a step)", lambda point: point.prediction.utilisation * 100),
    ("target", "How much sooner at the target", "Sooner than one worker (times)", lambda point: point.merit),
)


def charts(plan: Plan) -> list[Chart]:
    """Time of a step, samples per second, the busiest link, and time to target where it is known."""
    curves = _curves(plan)
    busy = {label: points for label, points in curves.items() if any(p.prediction.busiest.busy_s for p in points)}
    styles = strategy_styles(list(curves))
    found = [
        _drawn(plan, busy if key == "busiest" else curves, styles, key, title, y_title, value_of)
        for key, title, y_title, value_of in _CHARTS
        if key != "target" or plan.noise is not None
    ]
    return [chart for chart in found if len(chart.table)]


def _curves(plan: Plan) -> dict[str, list[Point]]:
    """The strategies that move something: without options, and with those that are best. Those that are the same share
    one curve, named after all of them."""
    best = {point.label for point in plan.best_of_each}
    wanted = [
        label
        for label in plan.curves
        if (":" not in label or label in best) and Variant.parse(label).strategy.traits.traffic
    ]
    alike: list[list[str]] = []
    for label in wanted:
        same = (group for group in alike if _are_same(plan.curves[group[0]], plan.curves[label]))
        if (group := next(same, None)) is not None:
            group.append(label)
        else:
            alike.append([label])
    alike.sort(key=lambda labels: plan.best.label not in labels)  # which is not to be among those that are left out
    return {" = ".join(labels): plan.curves[labels[0]] for labels in alike[:_MAX_CURVES]}


def _are_same(one: list[Point], other: list[Point]) -> bool:
    """Whether two curves are the same in every chart."""
    return [point.prediction.workers for point in one] == [point.prediction.workers for point in other] and all(
        math.isclose(value_of(a), value_of(b), rel_tol=_SAME)
        for _, _, _, value_of in _CHARTS
        for a, b in zip(one, other, strict=True)
    )


def _drawn(
    plan: Plan,
    curves: dict[str, list[Point]],
    styles: dict[str, Style],
    key: str,
    title: str,
    y_title: str,
    value_of: Callable[[Point], float],
) -> Chart:
    """A curve for each strategy against workers, its knee marked by a large open mark."""
    plot = canvas(x_title="Workers (number)", y_title=y_title, height_px=_HEIGHT_PX)
    known = {knee.label: knee.workers for knee in plan.knees}
    rows, notes = [], []
    for label, points in curves.items():
        style = styles[label]
        counts = [point.prediction.workers for point in points]
        values = [value_of(point) for point in points]
        rows += [(label, count, value) for count, value in zip(counts, values, strict=True)]
        plot.add_trace(curve(label, style, x=counts, y=values))
        knee = known.get(points[0].label)
        if knee is not None and counts[0] <= knee <= counts[-1]:
            mark = {"symbol": f"{style.marker}-open", "size": 15, "line": {"width": 2}}
            found: dict[str, Any] = {"x": [knee], "y": [_between(counts, values, knee)], "showlegend": False}
            plot.add_trace(
                curve(f"knee, {label}", style, mode="markers", legendgroup=plain(label), marker=mark, **found)
            )
            notes.append(f"{label}: {knee}")
    plot.update_xaxes(type="log", tickmode="array", tickvals=_ticks(curves), ticktext=[str(n) for n in _ticks(curves)])
    if key in ("step", "rate"):
        plot.update_yaxes(type="log", exponentformat="none", **_ticks_of([value for _, _, value in rows]))
    else:
        plot.update_yaxes(rangemode="tozero")
    if key == "rate":
        most = max(point.prediction.workers for point in plan.points)
        alone = plan.best.prediction.samples_per_s / plan.best.speedup
        ideal(plot, most, most * alone, first=alone)
    table = pd.DataFrame(rows, columns=["strategy", "workers", y_title])
    shown = f"Knees, as large open marks: {'; '.join(notes)} workers." if notes else "No curve has a knee."
    return Chart(
        key, title, plot, f"{title} against the number of workers, a curve each strategy. {shown}", table, (shown,)
    )


def _between(counts: list[int], values: list[float], count: int) -> float:
    """The curve's height at a number of workers between those that were looked at."""
    right = next(place for place, other in enumerate(counts) if other >= count)
    if counts[right] == count:
        return values[right]
    part = (count - counts[right - 1]) / (counts[right] - counts[right - 1])
    return values[right - 1] + part * (values[right] - values[right - 1])


def _ticks(curves: dict[str, list[Point]]) -> list[int]:
    most = max(point.prediction.workers for points in curves.values() for point in points)
    count = most.bit_length()
    return [2**exponent for exponent in range(0, count, 1 + count // 10)]


def _ticks_of(values: list[float]) -> dict[str, Any]:
    """On a logarithmic axis: 1, 2 and 5, or powers of ten where there are many; large ones as 10k and 2M."""
    spans_many = max(values) > 100 * min(values)
    return {"dtick": 1 if spans_many else "D2", "tickformat": "~s" if max(values) >= 1e5 else ",~g"}
