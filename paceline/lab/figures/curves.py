"""The experiment's curves: convergence rate, training rate, iteration rate; and strategies against each other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from paceline.lab import words
from paceline.lab.figures.chart import Chart, Subject, canvas, curve, draw_target, is_percent
from paceline.lab.figures.style import Style, plain

NUM_POINTS = 120
_NUM_MARKERS = 8
_NUM_ROWS = 12
_PAST_ARRIVAL = 1.1  # of the last arrival
_BAND = {"mode": "lines", "fill": "toself", "line": {"width": 0}, "opacity": 0.18, "hoverinfo": "skip"}
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """What one seed measured."""

    x: Floats
    """Rising; at least one point."""
    y: Floats
    holds_last: bool = False
    """What the curve is after its own end. True: its last value, as of a run that ended because it was good enough.
    False: unknown."""


@dataclass(frozen=True)
class Band:
    """A mean curve with the smallest and largest value of any seed; all of shape (points,)."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def convergence(subject: Subject) -> list[Chart]:
    """Iterations against the metric, a chart a strategy, a line a number of workers."""
    return [
        _by_workers(subject, strategy, "iteration", _iterations_title(subject, strategy))
        for strategy in _with_evaluations(subject)
    ]


def training(subject: Subject) -> list[Chart]:
    """Time against the metric."""
    return [_by_workers(subject, strategy, "time_s", subject.time_title) for strategy in _with_evaluations(subject)]


def iteration_rate(subject: Subject) -> list[Chart]:
    """Time against iterations: the steeper, the more iterations a second.

    Seeds make about as many iterations but may take quite different times, so the mean is of times at an iteration.
    """
    charts = []
    arrivals = _arrivals(subject.frames.pace)
    for strategy in subject.strategies:
        bands = _bands(subject, arrivals, strategy, x="iteration", y="time_s")
        if not bands:
            continue
        plot = canvas(x_title=subject.time_title, y_title=_iterations_title(subject, strategy))
        _draw(
            plot, {words.workers(n): found for n, found in bands.items()}, _named(subject, strategy), mean_along_x=True
        )
        fastest = {n: found.x[-1] / found.mean[-1] for n, found in bands.items() if found.mean[-1] > 0}
        rates = ", ".join(f"{words.workers(n)} {rate:.3g}" for n, rate in fastest.items())
        table = _table(bands, "workers", x="iterations", y=subject.seconds("time"))
        alternative = f"{strategy}: iterations over training time. Iterations a second: {rates}."
        charts.append(Chart(strategy, strategy, plot, alternative, table))
    return charts


def synchrony(subject: Subject) -> list[Chart]:
    """Strategies against each other at the largest number of workers that most of them finished."""
    times = "time_s", "per second", subject.time_title
    return _against(subject, [("samples", "per sample", "Samples trained on"), times])


def traffic(subject: Subject) -> list[Chart]:
    """The same over what all workers have moved."""
    if not subject.frames.evaluations["moved_bytes"].any():
        return []
    return _against(subject, [("moved_bytes", "per byte", "Moved by all workers (bytes)")])


def _against(subject: Subject, axes: Sequence[tuple[str, str, str]]) -> list[Chart]:
    """A chart for each column, its heading and its title, with a line a strategy."""
    count = _common_count(subject)
    if count is None or subject.metric is None:
        return []
    charts = []
    for x, title, x_title in axes:
        evaluations = _metric_rows(subject)
        bands: dict[str, Band] = {}
        styles: dict[str, Style] = {}
        notes: list[str] = []
        for strategy in subject.strategies:
            found = _bands(subject, evaluations, strategy, x=x, y="value")
            if count in found:
                name = f"{strategy} ({'sync' if subject.is_synchronous(strategy) else 'async'})"
                bands[name], styles[name] = found[count], subject.strategy_styles[strategy]
            notes += [f"{strategy}, {note}" for note in _diverged(subject, strategy, workers=count)]
        plot = canvas(x_title=x_title, y_title=_metric_title(subject))
        _finish_metric_axis(plot, subject)
        _draw(plot, bands, styles)
        heading = f"{words.workers(count)}, {title}"
        ends = "; ".join(f"{name} ends at {_shown(subject, found.mean[-1])}" for name, found in bands.items())
        table = _table(
            bands, "strategy", x=subject.seconds("time") if x == "time_s" else x_title.lower(), y=subject.metric
        )
        alternative = f"{subject.metric} of each strategy with {heading}. {ends}."
        charts.append(Chart(x, heading, plot, alternative, table, tuple(notes)))
    return charts


def _with_evaluations(subject: Subject) -> list[str]:
    if subject.metric is None:
        return []
    found = set(subject.of_finished(_metric_rows(subject))["strategy"])
    return [strategy for strategy in subject.strategies if strategy in found]


def _metric_rows(subject: Subject) -> pd.DataFrame:
    evaluations = subject.frames.evaluations
    return evaluations[evaluations["metric"] == subject.metric]


def _by_workers(subject: Subject, strategy: str, x: str, x_title: str) -> Chart:
    """The metric over the column `x`, one line a number of workers."""
    bands = _bands(subject, _metric_rows(subject), strategy, x=x, y="value")
    plot = canvas(x_title=x_title, y_title=_metric_title(subject))
    _finish_metric_axis(plot, subject)
    _draw(plot, {words.workers(n): found for n, found in bands.items()}, _named(subject, strategy))
    ends = "; ".join(
        f"{words.workers(n)} ends at {_shown(subject, found.mean[-1])} after {found.x[-1]:.4g}"
        for n, found in bands.items()
    )
    alternative = f"{strategy}: {subject.metric} over {x_title[0].lower()}{x_title[1:]}. {ends}."
    table = _table(bands, "workers", x=x_title, y=str(subject.metric))
    return Chart(strategy, strategy, plot, alternative, table, tuple(_diverged(subject, strategy)))


def _diverged(subject: Subject, strategy: str, **columns: object) -> list[str]:
    """Say which seeds' metric was no number any more: there the mean ends."""
    rows = subject.of_finished(_metric_rows(subject), strategy=strategy, **columns)
    lost = rows[~np.isfinite(rows["value"].to_numpy(dtype=float))].groupby(["workers", "seed"])["iteration"].min()
    return [
        f"{words.workers(count)}, seed {seed}: {subject.metric} is no finite number from iteration {first} on."
        for (count, seed), first in lost.items()
    ]


def _bands(subject: Subject, frame: pd.DataFrame, strategy: str, *, x: str, y: str) -> dict[int, Band]:
    """Mean and spread over the seeds of each number of workers; none where a seed has no finite value at all."""
    bands = {}
    limit = _limit(subject, strategy, x)
    for count in subject.counts_of(strategy):
        rows = subject.of_finished(frame, strategy=strategy, workers=count)
        rows = rows[rows[x] <= limit] if y == "value" else rows
        curves = [
            _curve(seed.sort_values(x), x, y, holds_last=y == "value" and trial in subject.reached)
            for trial, seed in rows.groupby("trial", sort=False)
        ]
        if curves and all(len(curve.x) for curve in curves):
            bands[count] = band(curves)
    return bands


def _limit(subject: Subject, strategy: str, x: str) -> float:
    """A little past the last arrival of all strategies that count alike: later nothing happens but runs that never
    arrive."""
    arrivals = {"time_s": "time_to_target_s", "iteration": "iterations_to_target", "samples": "samples_to_target"}
    trials = subject.finished
    if x not in arrivals:
        return math.inf
    alike = trials[trials["unit"] == subject.unit_of(strategy)] if x == "iteration" else trials
    last = float(alike[arrivals[x]].max())
    trains_on = len(subject.reached) < trials["reached"].sum()
    return _PAST_ARRIVAL * last if last > 0 and not trains_on else math.inf


def band(curves: Sequence[Curve]) -> Band:
    """The mean of curves on a grid of their own points, thinned to `NUM_POINTS`.

    It ends where the first of those ends that do not hold their last value; if all do, with the longest.
    """
    first = max(curve.x[0] for curve in curves)
    unheld = [curve.x[-1] for curve in curves if not curve.holds_last]
    last = max(min(unheld) if unheld else max(curve.x[-1] for curve in curves), first)
    own = np.unique(np.concatenate([curve.x for curve in curves]))
    grid = own[(own >= first) & (own <= last)]
    if len(grid) > NUM_POINTS:
        grid = grid[np.unique(np.linspace(0, len(grid) - 1, NUM_POINTS).round().astype(int))]
    values = np.stack([np.interp(grid, curve.x, curve.y) for curve in curves])
    return Band(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def _curve(rows: pd.DataFrame, x: str, y: str, *, holds_last: bool) -> Curve:
    """Up to the first value that is not finite: what comes after it is another matter, even if it is a number."""
    values = rows[y].to_numpy(dtype=float)
    num_known = int(np.logical_and.accumulate(np.isfinite(values)).sum())
    is_whole = num_known == len(values)
    return Curve(rows[x].to_numpy(dtype=float)[:num_known], values[:num_known], holds_last and is_whole)


def _arrivals(pace: pd.DataFrame) -> pd.DataFrame:
    """When each recorded iteration was first reached; iteration 0 at 0 s, when the training clock starts."""
    first = pace.sort_values("time_s").drop_duplicates(["trial", "iteration"])
    start = first.drop_duplicates("trial").assign(iteration=0, time_s=0.0)
    return pd.concat([start, first[first["iteration"] > 0]], ignore_index=True)


def _draw(
    plot: go.Figure, bands: Mapping[str, Band], styles: Mapping[str, Style], *, mean_along_x: bool = False
) -> None:
    """Spreads below, then lines, with a few markers each so that they can be told apart without colour."""
    across, up = ("y", "x") if mean_along_x else ("x", "y")
    for name, found in bands.items():
        outline = {
            across: np.concatenate([found.x, found.x[::-1]]).tolist(),
            up: np.concatenate([found.high, found.low[::-1]]).tolist(),
        }
        plot.add_trace(
            go.Scatter(**outline, **_BAND, fillcolor=styles[name].colour, legendgroup=plain(name), showlegend=False)
        )
    for name, found in bands.items():
        points = {across: found.x.tolist(), up: found.mean.tolist()}
        plot.add_trace(curve(name, styles[name], **points, marker={"maxdisplayed": _NUM_MARKERS}))


def _table(bands: Mapping[Any, Band], key: str, *, x: str, y: str) -> pd.DataFrame:
    """Up to a dozen points of each line; all of them are in the CSV files."""
    rows = []
    for name, found in bands.items():
        for index in np.unique(np.linspace(0, len(found.x) - 1, _NUM_ROWS).round().astype(int)):
            rows.append((name, found.x[index], found.mean[index], found.low[index], found.high[index]))
    return pd.DataFrame(rows, columns=[key, x, f"{y}, mean", "lowest seed", "highest seed"])


def _common_count(subject: Subject) -> int | None:
    """Where both kinds were finished if there are both, at as many strategies as possible, with most workers."""
    candidates = [
        (
            len({subject.is_synchronous(s) for s in subject.strategies if n in subject.counts_of(s)}),
            sum(n in subject.counts_of(s) for s in subject.strategies),
            n,
        )
        for n in subject.counts
    ]
    best = max(candidates, default=(0, 0, 0))
    return best[2] if best[1] >= 2 else None


def _named(subject: Subject, strategy: str) -> dict[str, Style]:
    return {words.workers(n): style for n, style in subject.worker_styles(strategy).items()}


def _iterations_title(subject: Subject, strategy: str) -> str:
    return f"Iterations ({words.ITERATIONS[subject.unit_of(strategy)]})"


def _metric_title(subject: Subject) -> str:
    metric = str(subject.metric)
    shown = plain(metric[0].upper() + metric[1:])
    return f"{shown} (%)" if _is_percent(subject) else f"{shown} (no unit)"


def _is_percent(subject: Subject) -> bool:
    return is_percent(str(subject.metric), _metric_rows(subject)["value"])


def _shown(subject: Subject, value: float) -> str:
    return f"{value:.1%}" if _is_percent(subject) else f"{value:.4g}"


def _finish_metric_axis(plot: go.Figure, subject: Subject) -> None:
    if _is_percent(subject):
        # The unit stands in the title; ticks carry the bare number.
        plot.update_yaxes(tickformat=".0%", hoverformat=".1%")
    if subject.target is not None:
        draw_target(plot, subject.target)
