"""What the step records of a trial add up to, read in blocks: a record of any length takes the same memory.

A trial is never resumed, so that its records begin with the training clock at zero.
"""

import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pandas as pd

from paceline.errors import UsageError
from paceline.records import EventRecord, StepRecord, read_records, record_path

PACE_POINTS = 300
_BLOCK_ROWS = 250_000
_SUMS = ("compute_s", "communication_s", "waiting_s", "hidden_s", "moved_bytes")
_PACE = ["time_s", "iteration", "moved_bytes"]
_TYPES = {name: f"{number.__name__}64" for name, number in get_type_hints(StepRecord).items() if number in (int, float)}


@dataclass(frozen=True)
class StepTotals:
    """Sums and counts over the steps of one run."""

    iterations: int
    time_s: float
    samples: int
    staleness: Counter[int]
    """Gradients that were applied, by their staleness."""
    workers: pd.DataFrame
    """Rows: workers, by rank. Columns: `steps`, compute_s, communication_s, waiting_s, hidden_s, moved_bytes."""
    pace: pd.DataFrame
    """time_s, iteration, and moved_bytes of all workers until then: about `PACE_POINTS` rows, the last step among them;
    none of the three ever falls."""

    def bytes_at(self, time_s: float) -> int:
        """Moved until then, about."""
        times, moved = ([0.0, *self.pace[column]] for column in ("time_s", "moved_bytes"))
        return round(float(np.interp(time_s, times, moved)))


def read(directory: Path) -> StepTotals:
    """The totals of a result directory, with zeros where no step was recorded. An unfinished last line is left out.
    Raises UsageError if the file of steps is damaged."""
    iterations = max((event.iteration for event in read_records(directory, EventRecord)), default=0)
    time_s, samples = 0.0, 0
    staleness: Counter[int] = Counter()
    workers, pace = [], []
    for block in _blocks(record_path(directory, StepRecord)):
        iterations = max(iterations, int(block["iteration"].max()))
        time_s = max(time_s, float(block["time_s"].max()))
        samples += int(block["samples"].sum())
        counts = block.loc[block["staleness"] >= 0, "staleness"].value_counts()
        staleness.update({int(value): int(count) for value, count in counts.items()})
        workers.append(_by_worker(block))
        pace.append(_thin(block[_PACE]))
    if not workers:
        empty = pd.DataFrame(columns=["steps", *_SUMS], index=pd.Index([], name="worker", dtype="int64"))
        return StepTotals(0, 0.0, 0, staleness, empty, pd.DataFrame(columns=_PACE))
    per_worker = pd.concat(workers).groupby(level="worker").sum()
    thinned = _thin(pd.concat(pace))
    thinned["moved_bytes"] = thinned["moved_bytes"].cumsum()
    return StepTotals(iterations, time_s, samples, staleness, per_worker, thinned)


def _by_worker(block: pd.DataFrame) -> pd.DataFrame:
    groups = block.groupby("worker")
    return groups[list(_SUMS)].sum().assign(steps=groups.size())


def _thin(points: pd.DataFrame) -> pd.DataFrame:
    """Fewer points in the order of time, each with what was moved since the one before."""
    ordered = points.sort_values("time_s", kind="stable")
    ordered["iteration"] = ordered["iteration"].cummax()
    kept = np.unique(np.linspace(0, len(ordered) - 1, PACE_POINTS).round().astype(int))
    moved = ordered["moved_bytes"].to_numpy().cumsum()[kept]
    return ordered.iloc[kept].assign(moved_bytes=np.diff(moved, prepend=0)).reset_index(drop=True)


def _blocks(path: Path) -> Iterator[pd.DataFrame]:
    source = _without_torn_end(path)
    if source is None:
        return
    try:
        with pd.read_csv(source, usecols=list(_TYPES), dtype=_TYPES, chunksize=_BLOCK_ROWS) as reader:
            yield from (block for block in reader if len(block))
    except ValueError as error:
        raise UsageError(f"{path} holds no steps of this version of Paceline: {error}") from None


def _without_torn_end(path: Path) -> Path | io.BytesIO | None:
    """The file itself where its last line is whole; else, as killed runs leave it, its whole lines; none: no line."""
    try:
        with path.open("rb") as file:
            if file.seek(0, io.SEEK_END) > 0:
                file.seek(-1, io.SEEK_END)
                if file.read(1) == b"\n":
                    return path
    except FileNotFoundError:
        return None
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    return io.BytesIO(whole) if whole else None
