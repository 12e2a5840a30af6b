"""`paceline attach`: show a run that is under way."""

import contextlib
import os
import select
from pathlib import Path
from typing import Annotated, BinaryIO, final

import typer
from rich.console import Console
from rich.text import Text

from paceline.cli import exit_codes
from paceline.cli.guarding import OUTPUT_FILE
from paceline.cli.runs import state_of
from paceline.cli.scale import directory_of
from paceline.config import RunConfig
from paceline.engines import requests
from paceline.engines.standing import Progress
from paceline.errors import UsageError
from paceline.running.result import Result
from paceline.running.watching import ProgressLine

_LOOK_S = 0.2
_LAST_BYTES = 4096  # of what was printed before
_STATUS = {"ended": 0, "interrupted": exit_codes.INTERRUPTED}


def attach(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of the run, or its name under runs/.", show_default=False)
    ],
) -> None:
    """Show a run of this host until it ends, and exit as it does: with 0, 130 if it was stopped, else 1.

    Ctrl-C leaves the run alone; `paceline stop` ends it. What scripts print is shown of runs with --detach.

    Example: paceline attach runs/mine
    """
    directory, console = directory_of(run), Console(stderr=True)
    manifest = Result.open(directory).manifest
    output = _Output(directory / OUTPUT_FILE, console)
    for process_of in (requests.guard_of, requests.launcher_of):  # where the guard dies, its launcher goes on
        if (process := process_of(directory)) is None:
            continue
        label = f"{manifest['strategy']['name']} x {manifest['num_workers']}"
        config = RunConfig(max_steps=manifest["config"]["max_steps"])
        try:
            with ProgressLine(console, label, config) as line:
                _follow(directory, process, line, output)
        except KeyboardInterrupt:
            _say(console, f"{directory} goes on; paceline stop {directory} ends it")
            raise
    output.show()
    state = state_of(Result.open(directory))
    _say(console, f"{directory}: {state}")
    raise typer.Exit(_STATUS.get(state, exit_codes.FAILED))


def _follow(directory: Path, keeper: int, line: ProgressLine, output: "_Output") -> None:
    """Show what there is to see until the run's guard or launcher has ended. A detached one prints its last words after
    it has ceased to answer; then its process ends. Others' processes may go on."""
    try:
        process = os.pidfd_open(keeper)
    except ProcessLookupError:
        return
    try:
        while not select.select([process], [], [], _LOOK_S)[0]:
            output.show()
            try:
                line.on_progress(Progress.from_json(requests.ask(directory, {"do": "progress"})))
            except UsageError:
                if requests.launcher_of(directory) != keeper and not output.is_of(keeper):
                    return
    finally:
        os.close(process)


@final
class _Output:
    """Shows what a detached run prints, from its last lines so far. Other runs have no such file."""

    def __init__(self, path: Path, console: Console) -> None:
        self._path, self._console = path, console
        self._shown: int | None = None  # bytes

    def is_of(self, process: int) -> bool:
        """Whether it prints there, and not a run that was in this directory before."""
        with contextlib.suppress(OSError):
            return os.path.samefile(f"/proc/{process}/fd/1", self._path)
        return False

    def show(self) -> None:
        """Show the lines that have come since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(_start_of_last_lines(file) if self._shown is None else self._shown)
            self._shown = file.tell()
            while (line := file.readline()).endswith(b"\n"):
                self._shown = file.tell()
                shown = Text.from_ansi(line.decode(errors="replace").rstrip("\n"))
                self._console.print(shown, soft_wrap=True)


def _start_of_last_lines(file: BinaryIO) -> int:
    skipped = file.seek(0, os.SEEK_END) - _LAST_BYTES
    if skipped <= 0:
        return 0
    file.seek(skipped)
    file.readline()
    return file.tell()


def _say(console: Console, words: str) -> None:
    console.print(words, markup=False, highlight=False, soft_wrap=True)
