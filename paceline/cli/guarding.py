"""The process that guards a detached run: where its launcher is killed, another one goes on from the checkpoint."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import typer

from paceline.cli import exit_codes
from paceline.engines.requests import Desk
from paceline.errors import UsageError

OUTPUT_FILE = "output.txt"
"""In the result directory: what a detached run's scripts print, and what the command would say at its end."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
class Guard:
    """Signals that would end this process are handed on to the launcher, whose end is this one's.

    Args:
        waiting: a pipe whose reader is told the result directory, once the run is under way.
    """

    def __init__(self, waiting: int) -> None:
        self._waiting = waiting
        self._desk: Desk | None = None
        self._launcher = 0
        self._is_ended = False

    def launch(self) -> tuple[int, Path | None]:
        """Go on in a child process, the launcher, and in another one whenever that is killed and has left a newer
        checkpoint than it began with. To be called while the process has one thread.

        Returns:
            In each launcher: a pipe to say the result directory to, and the directory to resume; none in the first.
        """
        directory: Path | None = None
        saved: int | None = None
        handlers = {number: signal.signal(number, self._hand_on) for number in _SIGNALS}
        while True:
            word, telling = os.pipe()
            self._launcher = os.fork()
            if not self._launcher:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                os.close(word)
                if self._desk is None:
                    os.close(self._waiting)
                else:
                    self._desk.close()
                return telling, directory
            os.close(telling)
            directory = self._hear(word) or directory
            status = self._end_of_launcher()
            if status >= 0 or directory is None or self._is_ended:
                raise typer.Exit(status if status >= 0 else 128 - status)
            saved = _newer_checkpoint(directory, than=saved)

    def _hear(self, word: int) -> Path | None:
        """The directory that the launcher says, if it comes so far. All that is printed goes there from then on."""
        said = os.read(word, 1 << 16)
        os.close(word)
        if not said:
            return None
        directory = Path(os.fsdecode(said))
        if self._desk is None:
            print_to(directory)
            self._desk = Desk(directory, _refuse, is_guard=True)
            with contextlib.suppress(OSError):  # who waited may be gone, as when its terminal was closed
                os.write(self._waiting, said)
            os.close(self._waiting)
        return directory

    def _end_of_launcher(self) -> int:
        """Its exit status, or minus the signal that it died of."""
        process = os.pidfd_open(self._launcher)
        if self._desk is not None:
            asked = self._desk.fileno()
            while process not in select.select([process, asked], [], [])[0]:
                self._desk.turn()
        os.close(process)
        _, status = os.waitpid(self._launcher, 0)
        self._launcher = 0
        return os.waitstatus_to_exitcode(status)

    def _hand_on(self, number: int, frame: object) -> None:
        if self._launcher:
            os.kill(self._launcher, signal.SIGTERM)
        else:
            self._is_ended = True


def print_to(directory: Path) -> None:
    """What this process prints, and those that it starts, goes to a file of the result directory from here on."""
    with (directory / OUTPUT_FILE).open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def _newer_checkpoint(directory: Path, *, than: int | None) -> int:
    """Its iteration. Exits where there is none: another launcher would die as this one did."""
    from paceline.checkpoint import FILE_NAME  # here, because torch takes a while to load
    from paceline.checkpoint_files import iteration_of

    newest = iteration_of(directory / FILE_NAME)
    if newest is None or newest == than:
        print("the launcher was killed, and has left no newer checkpoint to go on from", file=sys.stderr, flush=True)
        raise typer.Exit(exit_codes.FAILED)
    print(f"the launcher was killed; another one goes on from iteration {newest}", file=sys.stderr, flush=True)
    return newest


def _refuse(request: Mapping[str, Any]) -> str:
    raise UsageError("the launcher was killed, and another one is being started; ask again in some seconds")
