"""The summary of a study as a reader's table: texts with units and spreads."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from paceline.config import Target
from paceline.lab import words
from paceline.lab.analysis import num_tried
from paceline.lab.comparing import TIME
from paceline.lab.frames import FINISHED, Frames
from paceline.training.holding import Streak

NEVER, NONE = "never", "–"
_TIE = "≈"
_NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Cell:
    text: str
    spread: str = ""


def summary_table(frames: Frames, *, has_target: bool, metric: str | None, seconds: str) -> dict[str, Any]:
    """`headings` and `rows` of cells for templates, a row for each strategy and number of workers. The first to the
    target is marked; where chance may explain their differences, so is each that may be the first. `seconds` is `s` or
    `virtual s`. Without a target the columns that speak of it are left out."""
    summary = frames.summary
    virtual, seconds = seconds.removesuffix("s"), seconds.replace(" ", _NO_BREAK)
    columns: list[tuple[str, Callable[[Any], Cell]]] = []
    if has_target:
        passed = passed_targets(frames)
        for target, times_s in passed.items():
            columns.append((f"time to {target} ({seconds})", partial(_passed, times_s=times_s)))
        columns += [
            (f"time to target ({seconds})", lambda row: _spread(row, "time_to_target_s", words.quantity)),
            (f"{virtual}speed-up", lambda row: _spread(row, "speedup", lambda value: f"{value:.2f}")),
            ("efficiency", lambda row: Cell(_spread(row, "efficiency", lambda value: f"{value:.0%}").text)),
            (f"cost ({virtual}process-s)", lambda row: _spread(row, "cost_s_to_target", words.quantity)),
            ("samples to target", lambda row: _spread(row, "samples_to_target", _count)),
        ]
    columns += [
        (f"samples/{seconds}", lambda row: _spread(row, "samples_per_s", _count)),
        (f"iterations/{seconds}", lambda row: _spread(row, "iterations_per_s", words.quantity)),
        (f"last {metric or 'metric'}", lambda row: _spread(row, "last_metric", lambda value: f"{value:.3g}")),
    ]
    if has_target:
        columns.append(("seeds that reached", lambda row: Cell(f"{row['reached']} of {num_tried(row)}")))
    else:
        columns.append(("seeds", lambda row: Cell(str(row["seeds"]))))
    first = first_of(frames)
    rows = []
    for _, row in summary.iterrows():
        is_first = (row["strategy"], row["workers"]) in first
        tie = f"{_TIE} " if is_first and len(first) > 1 else ""
        cells = [Cell(f"{tie}{row['strategy']}"), Cell(str(row["workers"])), *(cell(row) for _, cell in columns)]
        rows.append({"cells": cells, "is_best": is_first and len(first) == 1})
    return {"headings": ["strategy", "workers", *(heading for heading, _ in columns)], "rows": rows}


def first_of(frames: Frames) -> set[tuple[str, int]]:
    """Each combination that may be the first to the target; none where nobody knows what chance explains."""
    first = frames.compared(TIME).query("may_be_best")
    return set(first.index) if len(first) == 1 or first["spread"].notna().any() else set()


def passed_targets(frames: Frames) -> dict[str, pd.Series]:
    """For each target on the way to the last one: when a trial first held it, by strategy and workers."""
    trials = frames.trials[frames.trials["status"] == FINISHED]
    found = {}
    for text in next((str(text) for text in trials["passed_targets"] if text), "").split():
        target, times_s = Target.parse(text), {}
        rows = frames.evaluations[frames.evaluations["metric"] == target.metric].sort_values("time_s", kind="stable")
        by_trial = dict(list(rows.groupby("trial", sort=False)))
        for trial in trials.itertuples():
            streak, own = Streak(target, int(trial.hold) or 1), by_trial.get(trial.trial, rows.iloc[:0])
            is_held = any(streak.add({target.metric: row.value}, row.time_s) for row in own.itertuples())
            times_s[trial.Index] = streak.began_s if is_held else math.nan
        found[str(target)] = trials.assign(time_s=pd.Series(times_s)).set_index(["strategy", "workers"])["time_s"]
    return found


def _passed(row: Any, *, times_s: pd.Series) -> Cell:
    """Mean of those that got there, and how many did where not all."""
    own = times_s[times_s.index == (row["strategy"], row["workers"])]
    known = own.dropna()
    if known.empty:
        return Cell(NEVER if len(own) else NONE)
    return Cell(words.quantity(float(known.mean())), f"{len(known)} of {len(own)}" if len(known) < len(own) else "")


def _spread(row: Any, quantity: str, shown: Callable[[float], str]) -> Cell:
    """Mean, and lowest to highest where they differ as shown."""
    if math.isnan(row[quantity]):
        return Cell(NEVER if quantity == "time_to_target_s" and row["seeds"] else NONE)
    low, high = shown(row[f"{quantity}_low"]), shown(row[f"{quantity}_high"])
    return Cell(shown(row[quantity]), f"{low}–{high}" if low != high else "")


def _count(value: float) -> str:
    return f"{value:,.0f}"
