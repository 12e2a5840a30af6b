"""`paceline runs`: what became of the runs in a folder."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.engines import requests
from paceline.errors import UsageError
from paceline.running.result import Result
from paceline.training.pauses import MODEL_FILE

CUT_OFF = "cut off"
"""The outcome of a run that nobody ended."""


def runs(
    folder: Annotated[Path, typer.Argument(help="Where result directories lie.")] = Path("runs"),
) -> None:
    """List the runs in a folder, and which of them are under way on this host.

    Example: paceline runs
    """
    found = [found for directory in sorted(folder.glob("*/")) if (found := _opened(directory)) is not None]
    if not found:
        raise UsageError(f"there is no run in {folder}")
    table = Table("run", "state", "strategy", "workers", "iterations", "began", box=None)
    for result in found:
        manifest = result.manifest
        strategy, workers = manifest["strategy"]["name"], _num_workers(result)
        row = (
            result.directory.name,
            state_of(result),
            strategy,
            str(workers),
            f"{result.iteration:,}",
            manifest["started"],
        )
        table.add_row(*row)
    Console().print(table)


def state_of(result: Result) -> str:
    """Say in one word what the run does now, or how it ended."""
    if requests.is_under_way(result.directory):
        return "under way"
    return outcome_of(result)


def outcome_of(result: Result) -> str:
    """How a run that is not under way ended, in a word."""
    names: set[str] = set()
    for event in result.events:  # a run that was resumed has ended before
        names = {event.name} if event.name == "started" else names | {event.name}
    for name in ("failed", "interrupted", "ended"):
        if name in names:
            return name
    # Those of `paceline serve` and `paceline join` say no more than that.
    return "ended" if (result.directory / MODEL_FILE).exists() else CUT_OFF


def _num_workers(result: Result) -> int:
    """Counts the workers that the run had after it last changed them."""
    changed = [event for event in result.events if event.name == "reformed"]
    return len(changed[-1].details["ranks"]) if changed else int(result.manifest["num_workers"])


def _opened(directory: Path) -> Result | None:
    try:
        return Result.open(directory)
    except UsageError:
        return None
