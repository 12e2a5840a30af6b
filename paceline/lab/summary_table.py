"""The summary of a study as a reader's table: texts with units and spreads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from paceline.lab import words
from paceline.lab.reliability import num_tried, surest

NEVER, NONE = "never", "–"
_NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Cell:
    text: str
    spread: str = ""


@dataclass(frozen=True)
class Row:
    cells: list[Cell]
    is_best: bool
    """Whether it is the first to the target."""


@dataclass(frozen=True)
class SummaryTable:
    headings: list[str]
    rows: list[Row]


def summary_table(summary: pd.DataFrame, *, has_target: bool, metric: str | None, seconds: str) -> SummaryTable:
    """One row a strategy and number of workers.

    Args:
        summary: the frame of that name.
        has_target: whether the study had one; without it the columns that speak of it are left out.
        metric: heading of the last metric.
        seconds: `s`, or what says that they are virtual: `virtual s`.
    """
    virtual, seconds = seconds.removesuffix("s"), seconds.replace(" ", _NO_BREAK)
    columns: list[tuple[str, Callable[[Any], Cell]]] = []
    if has_target:
        columns += [
            (
                f"time to target ({seconds})",
                lambda row: _spread(row, "time_to_target_s", words.quantity, none=_why_none(row)),
            ),
            (f"{virtual}speed-up", lambda row: _spread(row, "speedup", lambda value: f"{value:.2f}")),
            ("efficiency", lambda row: Cell(_or_none(row["efficiency"], lambda value: f"{value:.0%}"))),
            (f"cost ({virtual}worker-s)", lambda row: _spread(row, "worker_s_to_target", words.quantity)),
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
    best = _first(summary)
    rows = [
        Row([Cell(str(row["strategy"])), Cell(str(row["workers"])), *(cell(row) for _, cell in columns)], index == best)
        for index, row in summary.iterrows()
    ]
    return SummaryTable(["strategy", "workers", *(heading for heading, _ in columns)], rows)


def _first(summary: pd.DataFrame) -> Any:
    """The row that was first to the target, as the verdict chooses it."""
    candidates = surest(summary)
    return candidates["time_to_target_s"].idxmin() if len(candidates) else None


def _spread(row: Any, quantity: str, shown: Callable[[float], str], *, none: str = NONE) -> Cell:
    """Mean, and lowest to highest where they differ as shown."""
    if math.isnan(row[quantity]):
        return Cell(none)
    low, high = shown(row[f"{quantity}_low"]), shown(row[f"{quantity}_high"])
    return Cell(shown(row[quantity]), f"{low}–{high}" if low != high else "")


def _why_none(row: Any) -> str:
    return NEVER if row["seeds"] else NONE


def _or_none(value: float, shown: Callable[[float], str]) -> str:
    return NONE if math.isnan(value) else shown(value)


def _count(value: float) -> str:
    return f"{value:,.0f}"
