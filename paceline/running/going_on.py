"""Where a run goes on from: the checkpoint of a result directory, or a copy at an address."""

from pathlib import Path

from paceline.running import checkpoint_copies, resuming
from paceline.running.places import is_address


def found(
    resume: str | Path | None, which: str | int, *, copied_to: str | None
) -> tuple[resuming.Found | None, Path | None]:
    """The checkpoint to go on from, and the result directory that it lies in, if it does. Raises UsageError."""
    if resume is None:
        return None, None
    before = resumed_directory(resume)
    if before is not None:
        return resuming.find(before, which), before
    try:
        return checkpoint_copies.find(str(resume), which), None
    except checkpoint_copies.NothingThere:
        if which != resuming.NEWEST or copied_to is None or not checkpoint_copies.are_one(str(resume), copied_to):
            raise
        return None, None  # the same command begins the run, and goes on with it on another machine


def resumed_directory(resume: str | Path | None) -> Path | None:
    """The result directory of the run to go on with, if that is what it is known by."""
    return None if resume is None or is_address(resume) else Path(resume)
