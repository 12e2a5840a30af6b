"""The checkpoints that a result directory keeps: the newest, those before it under their iterations, and the best.

The newest is always `checkpoint.pt`. What is there says of itself which iteration it is of (`sealing.py`), so that
nothing else has to be remembered from one run to the next.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

from paceline import durable, sealing
from paceline.checkpoint import FILE_NAME
from paceline.config import Best
from paceline.row_file import DIRECTORY

BEST_NAME = "checkpoint-best.pt"
_NUMBERED = "checkpoint-[0-9]*.pt"


@final
class CheckpointFiles:
    """Writes them, of one run at a time.

    Args:
        keep: how many, the newest among them.
        best: has the best one kept besides.
    """

    def __init__(self, directory: Path, *, keep: int = 2, best: Best | None = None) -> None:
        self._directory, self._keep, self._best = directory, keep, best
        self._newest = directory / FILE_NAME

    def write(self, content: Iterable[bytes | memoryview]) -> None:
        """Make this the newest. Until it is whole and on the disk, all that was there stays. Raises OSError."""
        try:
            self._write(content)
        finally:  # it may have its name, or not
            _drop_unused_rows(self._directory)

    def _write(self, content: Iterable[bytes | memoryview]) -> None:
        with durable.whole(self._newest) as partial:
            with partial.open("wb") as file:
                file.writelines(content)
            before = iteration_of(self._newest)
            if before is not None and before != iteration_of(partial) and self._keep > 1:
                durable.also(self._newest, numbered(self._directory, before))
        for surplus in _numbered(self._directory)[self._keep - 1 :]:
            surplus.unlink(missing_ok=True)
        if self._best is not None and self._is_best(self._best):
            durable.also(self._newest, self._directory / BEST_NAME)

    def _is_best(self, best: Best) -> bool:
        value = _metric_of(self._newest, best.metric)
        return value is not None and best.is_better(value, _metric_of(self._directory / BEST_NAME, best.metric))


def numbered(directory: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies once there is a newer one."""
    return directory / f"checkpoint-{iteration}.pt"


def from_newest(directory: Path) -> list[Path]:
    """Where checkpoints lie, from the newest to the oldest; the best, of whatever iteration, comes last."""
    best = directory / BEST_NAME
    return [directory / FILE_NAME, *_numbered(directory), *([best] if best.exists() else [])]


def go_back(chosen: Path, *, iteration: int) -> None:
    """A run goes on in its directory from this checkpoint, of this iteration: it is the newest, and no later one is
    there. Raises OSError."""
    directory = chosen.parent
    if chosen.name != FILE_NAME:
        durable.also(chosen, directory / FILE_NAME)
    best = directory / BEST_NAME
    later = [path for path in _numbered(directory) if _number_of(path) >= iteration]
    if best.exists() and best != chosen and (iteration_of(best) or 0) > iteration:
        later.append(best)
    for path in later:
        path.unlink(missing_ok=True)
    _drop_unused_rows(directory)


def copy_newest(source: Path, target: Path) -> None:
    """Have another directory hold the newest checkpoint of this one, and the rows that servers have written beside it.
    A run may go on in `source`, and remove rows that no checkpoint names any more: then it is a newer one. Raises
    OSError."""
    shutil.copyfile(source / FILE_NAME, target / FILE_NAME)
    rows = _rows_of(target / FILE_NAME)
    if not rows:
        return
    try:
        shutil.copytree(source / rows, target / rows, copy_function=_link)
    except OSError:
        if rows == _rows_of(source / FILE_NAME):
            raise
        shutil.rmtree(target / rows, ignore_errors=True)
        copy_newest(source, target)


def _link(source: str, target: str) -> None:
    """Files of rows do not change any more, so that a second name is as good as a copy, and takes no time."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def drop_all(directory: Path) -> None:
    """Drop all checkpoints: nobody will go on with the run of this directory."""
    for path in from_newest(directory):
        path.unlink(missing_ok=True)
    _drop_unused_rows(directory)


def _drop_unused_rows(directory: Path) -> None:
    """Rows that servers have written, and no checkpoint that is here names. One that cannot be read may name any."""
    try:
        used = {_rows_of(path) for path in from_newest(directory)}
    except OSError:
        return
    for path in directory.glob("rows-*"):
        if DIRECTORY.fullmatch(path.name) and path.name not in used:
            shutil.rmtree(path, ignore_errors=True)


def _rows_of(path: Path) -> str | None:
    """The directory that the file names, if it is there and names one. Raises OSError if it cannot be read."""
    try:
        rows = sealing.facts_of(path).get("rows")
    except (FileNotFoundError, ValueError):
        return None
    return rows if isinstance(rows, str) and DIRECTORY.fullmatch(rows) else None


def _numbered(directory: Path) -> list[Path]:
    """The files with an iteration in their name, from the latest to the earliest."""
    found = [path for path in directory.glob(_NUMBERED) if path.stem.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=_number_of, reverse=True)


def _number_of(path: Path) -> int:
    return int(path.stem.removeprefix("checkpoint-"))


def iteration_of(path: Path) -> int | None:
    """What the file says of itself; none, where there is no file, or it does not say."""
    iteration = _fact_of(path, "iteration")
    return iteration if isinstance(iteration, int) else None


def _metric_of(path: Path, name: str) -> float | None:
    metrics = _fact_of(path, "metrics")
    value = metrics.get(name) if isinstance(metrics, dict) else None
    return value if isinstance(value, float) else None


def _fact_of(path: Path, name: str) -> Any:
    try:
        return sealing.facts_of(path).get(name)
    except (OSError, ValueError):
        return None
