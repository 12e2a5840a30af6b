"""Which part of its seeds brought a strategy on a number of workers to the target. A trial that failed did not."""

from __future__ import annotations

from typing import Any

import pandas as pd


def num_tried(row: Any) -> int:
    """Trials of a row of the summary that have ended, well or not."""
    return int(row["seeds"] + row["failed"])


def reliability(row: Any) -> float:
    return float(row["reached"] / num_tried(row)) if num_tried(row) else 0.0


def surest(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows that reached the target with the largest part of their seeds, which alone may win.

    An average over the few seeds that got there does not beat a sure thing.
    """
    reached = summary[summary["reached"] > 0]
    sure = reached.apply(reliability, axis="columns", result_type="reduce")
    return reached[sure == sure.max()] if len(reached) else reached
