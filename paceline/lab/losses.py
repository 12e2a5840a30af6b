"""What failures took of each arm of a study, as a reader's table."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.lab import step_totals, words
from paceline.lab.frames import FINISHED, Frames
from paceline.lab.runner import TRIALS
from paceline.lab.summary_table import NONE
from paceline.records import EventRecord, read_records
from paceline.running.goodput import Goodput

HEADINGS = ("strategy", "workers", "goodput", "regrouping", "steps lost", "starting", "price")
_PARTS = ("goodput", "regrouping", "steps", "starting")


def of_trials(directory: Path, frames: Frames) -> dict[str, Goodput]:
    """By trial, of those in which workers could die and that have finished."""
    names = frames.trials.loc[frames.trials["status"] == FINISHED, "trial"]
    found = {name: _of_trial(directory / TRIALS / name) for name in names}
    return {name: goodput for name, goodput in found.items() if goodput is not None}


def table(frames: Frames, found: Mapping[str, Goodput]) -> dict[str, Any]:
    """`headings` and `rows` of texts, one a strategy and number of workers; empty where nobody could die."""
    rows = []
    for (strategy, workers), trials in frames.trials.groupby(["strategy", "workers"], sort=False):
        own = [found[name] for name in trials["trial"] if name in found]
        if own:
            parts = [_mean([getattr(each, part) for each in own], words.percent) for part in _PARTS]
            price = _mean([each.cost for each in own], words.quantity)
            rows.append([strategy, str(workers), *parts, price])
    return {"headings": HEADINGS, "rows": rows} if rows else {}


def _of_trial(directory: Path) -> Goodput | None:
    parts = ["compute_s", "communication_s", "waiting_s"]
    events = read_records(directory, EventRecord)
    return Goodput.of(events, worker_s=lambda: float(step_totals.read(directory).workers[parts].sum().sum()))


def _mean(values: Sequence[float], said: Any) -> str:
    mean = sum(values) / len(values)
    return NONE if math.isnan(mean) else str(said(mean))
