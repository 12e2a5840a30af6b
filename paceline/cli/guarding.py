"""The process that guards a detached run: where its launcher is killed, another one goes on from the checkpoint."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import typer

from paceline.cli import exit_codes
from paceline.engines.requests import Desk, ask, launcher_of
from paceline.engines.standing import LauncherLost
from paceline.errors import UsageError

OUTPUT_FILE = "output.txt"
"""In the result directory: what a detached run's scripts print, and what the command would say at its end."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Resumed(NamedTuple):
    """A guard has another launcher go on with a run."""

    run: Path
    """The run's result directory."""
    lost: LauncherLost


@final
class Guard:
    """The end of the launcher is this process's, and so is what would end this process the launcher's.

    Args:
        waiting: a pipe whose reader is told the result directory, once the run is under way.
    """

    def __init__(self, waiting: int) -> None:
        self._waiting = waiting
        self._directory: Path | None = None
        self._desk: Desk | None = None
        self._launcher = 0
        self._is_starting = True
        self._is_ended = False

    def launch(self) -> tuple[int, Resumed | None]:
        """Go on in a child process, the launcher, and in another one whenever that is killed in the midst of the run
        and has left a newer checkpoint than it began with. To be called while the process has one thread.

        Returns:
            In each launcher: a pipe to say the result directory to, and what to resume; none in the first.
        """
        resumed: Resumed | None = None
        handlers = {number: signal.signal(number, self._hand_on) for number in _SIGNALS}
        while True:
            word, telling = os.pipe()
            self._is_starting = True
            # A signal waits here until parent and child have their own handlers, and the parent knows the child.
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            if self._is_ended:
                raise typer.Exit(exit_codes.INTERRUPTED)
            self._launcher = os.fork()
            if not self._launcher:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
                os.close(word)
                if self._desk is None:
                    os.close(self._waiting)
                else:
                    self._desk.close()
                return telling, resumed
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            os.close(telling)
            self._hear(word)
            launcher = self._launcher
            status = self._end_of_launcher()
            if status >= 0 or self._directory is None or self._is_ended:
                raise typer.Exit(status if status >= 0 else 128 - status)
            iteration = _unfinished_at(self._directory)
            saved = _newer_checkpoint(self._directory, than=None if resumed is None else resumed.lost.resumed_at)
            lost = LauncherLost(launcher, _name_of(-status), iteration, saved)
            print(f"the launcher was killed; another one goes on: {lost}", file=sys.stderr, flush=True)
            resumed = Resumed(self._directory, lost)

    def _hear(self, word: int) -> None:
        """The launcher says the directory, if it comes so far. All that is printed goes there from then on."""
        self._wait_for(word)
        said = os.read(word, 1 << 16)
        os.close(word)
        self._is_starting = not said
        if said and self._desk is None:
            self._directory = Path(os.fsdecode(said))
            print_to(self._directory)
            self._desk = Desk(self._directory, self._refuse, is_guard=True)
            with contextlib.suppress(OSError):  # who waited may be gone, as when its terminal was closed
                os.write(self._waiting, said)
            os.close(self._waiting)

    def _end_of_launcher(self) -> int:
        """The launcher's exit status, or minus the signal that it died of."""
        process = os.pidfd_open(self._launcher)
        self._wait_for(process)
        os.close(process)
        launcher, self._launcher = self._launcher, 0
        return os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])

    def _wait_for(self, descriptor: int) -> None:
        """Wait until the descriptor can be read; whoever asks meanwhile is answered."""
        asked = [] if self._desk is None else [self._desk.fileno()]
        while descriptor not in select.select([descriptor, *asked], [], [])[0]:
            if self._desk is not None:
                self._desk.turn()

    def _hand_on(self, number: int, frame: object) -> None:
        """Hand a signal on to the launcher: the first time as `paceline stop` does, if the launcher hears that. A
        signal may have come to both processes, and the second one that the launcher gets has it end without saving."""
        is_first, self._is_ended = not self._is_ended, True
        if self._launcher and not (is_first and self._has_asked()):
            os.kill(self._launcher, signal.SIGTERM)

    def _has_asked(self) -> bool:
        if self._directory is None or launcher_of(self._directory) is None:
            return False
        with contextlib.suppress(UsageError):
            ask(self._directory, {"do": "stop"})
            return True
        return False

    def _refuse(self, request: Mapping[str, Any]) -> str:
        if self._is_starting:
            raise UsageError("the launcher was killed, and another one is being started; ask again in some seconds")
        raise UsageError("the run is ending")


def _name_of(number: int) -> str:
    """The signal's name, or its number: real-time signals have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def print_to(directory: Path) -> None:
    """From here on this process, and those that it starts, print to a file of the result directory."""
    with (directory / OUTPUT_FILE).open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def _unfinished_at(directory: Path) -> int:
    """The iteration that the run had come to. Exits where it had failed, was interrupted or had ended as its launcher
    was killed."""
    from paceline.cli.runs import CUT_OFF, outcome_of
    from paceline.running.result import Result

    result = Result(directory)
    outcome = outcome_of(result)
    if outcome != CUT_OFF:
        print(f"the launcher was killed, and the run goes on no more: {outcome}", file=sys.stderr, flush=True)
        raise typer.Exit(exit_codes.FAILED)
    return result.iteration


def _newer_checkpoint(directory: Path, *, than: int | None) -> int:
    """The iteration of a newer checkpoint. Exits where there is none: another launcher would die as this one did."""
    from paceline.checkpoint import FILE_NAME  # here, because torch takes a while to load
    from paceline.checkpoint_files import iteration_of

    newest = iteration_of(directory / FILE_NAME)
    if newest is None or newest == than:
        print("the launcher was killed, and has left no newer checkpoint to go on from", file=sys.stderr, flush=True)
        raise typer.Exit(exit_codes.FAILED)
    return newest
