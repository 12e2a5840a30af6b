"""The figures of a report: which there are, in which order, and how to read each."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.lab.figures import breakdown, curves, efficiency, ranking, scaling, staleness
from paceline.lab.figures.chart import Chart, Subject, say_cluster, share_ranges

__all__ = ["Chart", "Figure", "Subject", "figures"]

_SPREAD = "Lines are means over seeds; the band reaches from the lowest to the highest seed."
_HELD = "A run that reached the target keeps its last value; where any other ends or diverges, so does the mean."


@dataclass(frozen=True)
class Figure:
    """One question, and a chart or several that answer it."""

    key: str
    title: str
    reading: str
    """How to read it, in a sentence or two."""
    rows: list[list[Chart | None]]
    """Charts that belong side by side: one a subject, in the subjects' order; none where a subject has no such."""
    is_detail: bool
    """Whether it stands among those that only some readers want."""
    failure: str = ""
    """Why it could not be drawn, where that is so."""


@dataclass(frozen=True)
class _Kind:
    key: str
    title: str
    reading: str
    draw: Callable[[Subject], list[Chart]]
    shares_axes: bool = False
    starts_at_zero: bool = False
    is_detail: bool = False


_KINDS = (
    _Kind(
        "time-to-target",
        "Time to target",
        "Large marks: what a run typically takes; small ones: every run; ▷ ended before it arrived. Full marks may be "
        "the first (≈ if several): their bars cross the line of the best, so that chance may explain the difference "
        "(95 %, over all comparisons). Hollow marks are behind.",
        ranking.time_to_target,
    ),
    _Kind(
        "speed-up",
        "Speed-up",
        "How many times sooner n workers reach the target than the base does. The dashed diagonal is ideal; fine dots "
        "are Amdahl's law fitted to each strategy up to its fastest. Whiskers: lowest to highest pairing of seeds.",
        scaling.speedup,
    ),
    _Kind(
        "convergence",
        "Convergence rate",
        f"What each iteration is worth: steeper is better. {_SPREAD} {_HELD}",
        curves.convergence,
        shares_axes=True,
    ),
    _Kind(
        "training",
        "Training rate",
        f"What each second is worth: this is what one waits for. {_SPREAD} {_HELD}",
        curves.training,
        shares_axes=True,
    ),
    _Kind(
        "iteration-rate",
        "Iteration rate",
        f"How fast iterations go by, whatever they are worth. {_SPREAD}",
        curves.iteration_rate,
        shares_axes=True,
        starts_at_zero=True,
        is_detail=True,
    ),
    _Kind(
        "synchrony",
        "Synchronous against asynchronous",
        f"All strategies at the same number of workers: per sample, then per second. {_SPREAD} {_HELD}",
        curves.synchrony,
        is_detail=True,
    ),
    _Kind(
        "traffic",
        "What a byte is worth",
        f"As above, over the bytes that all workers have sent and received: what a slow network decides by. {_SPREAD} "
        f"{_HELD}",
        curves.traffic,
        is_detail=True,
    ),
    _Kind(
        "efficiency",
        "Hardware against statistical efficiency",
        "Right is more samples a second, down is fewer samples to the target; along a dotted diagonal the time to "
        "target is the same. Numbers at the marks are workers.",
        efficiency.efficiency,
        is_detail=True,
    ),
    _Kind(
        "cost",
        "Cost to target",
        "Workers and servers times seconds: what a cluster bills. Marks and bars as of the time to target.",
        ranking.cost_to_target,
        is_detail=True,
    ),
    _Kind(
        "shares",
        "Where time goes, by number of workers",
        "All workers and seeds together; “overlapped” is compute behind which gradients moved. What grows with the "
        "number of workers is what binds.",
        breakdown.shares,
    ),
    _Kind(
        "per-worker",
        "Where time goes, worker by worker",
        "At the largest number of workers. A straggler computes or communicates longer, and the others wait for it.",
        breakdown.per_worker,
        is_detail=True,
    ),
    _Kind(
        "staleness",
        "Staleness",
        "How many updates others made between a worker's reading of the parameters and the use of its gradient.",
        staleness.staleness,
        is_detail=True,
    ),
)


def figures(subjects: Sequence[Subject]) -> list[Figure]:
    """Every figure that the subjects' records allow, with their charts side by side.

    A figure that cannot be drawn says so: numbers that nobody thought of are not to cost the others.
    """
    found = []
    for kind in _KINDS:
        try:
            rows, failure = _draw(kind, subjects), ""
        except Exception as error:
            rows, failure = [], _in_words(error)
        if rows or failure:
            found.append(Figure(kind.key, kind.title, kind.reading, rows, kind.is_detail, failure))
    return found


def _draw(kind: _Kind, subjects: Sequence[Subject]) -> list[list[Chart | None]]:
    columns = [{chart.key: chart for chart in kind.draw(subject)} for subject in subjects]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    if kind.shares_axes:
        share_ranges([chart for column in columns for chart in column.values()], from_zero=kind.starts_at_zero)
    for subject, column in zip(subjects, columns, strict=True):
        for chart in column.values() if subject.is_virtual else ():
            say_cluster(chart.plot, subject.cluster)
    return [[column.get(key) for column in columns] for key in keys]


def _in_words(error: Exception) -> str:
    """The error with its place in the code, since whoever sees it on the page has no traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = [frame for frame in frames if Path(frame.filename).is_relative_to(Path(__file__).parent)][-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
