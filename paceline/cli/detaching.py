"""`paceline run --detach`: the run in a process of its own session, which its terminal's end does not reach."""

import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn, final

import typer
from rich.console import Console

from paceline.cli.guarding import Guard, Resumed, print_to
from paceline.engines.standing import Progress, Watcher


@final
class Detached(Watcher):
    """A context in which a run needs nobody who looks on.

    Once its processes are being started, whoever waits for the run is told, and what is printed goes to a file of its
    directory.
    """

    def __init__(self, waiting: int, directory: Path) -> None:
        """`waiting` is the descriptor of a pipe whose reader waits for the directory's name."""
        self._waiting: int | None = waiting
        self._directory = directory
        self._silence = contextlib.redirect_stdout(io.StringIO())  # Ray's notices say less than a run's own errors

    def __enter__(self) -> "Detached":
        self._silence.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._silence.__exit__(*failure)

    def on_progress(self, progress: Progress) -> None:
        if self._waiting is None:
            return
        print_to(self._directory)
        from paceline.running.chaos import launcher  # here, because torch takes a while to load

        launcher.arm(self._directory)
        with contextlib.suppress(OSError):  # its guard may be gone
            os.write(self._waiting, os.fsencode(self._directory))
        os.close(self._waiting)
        self._waiting = None

    def on_output(self, who: str, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk, or a terminal that was closed, does not end the run
            print(f"[{who}] {line}", file=sys.stderr, flush=True)


def detach() -> tuple[int, Resumed | None]:
    """Go on in a guarded process of a session of its own; this one waits until the run is under way, and exits.

    To be called while the process has one thread.

    Returns:
        The descriptor that `Detached` tells by, and the run to resume, where a launcher was killed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    word, waiting = os.pipe()
    child = os.fork()
    if child:
        os.close(waiting)
        _wait(child, word)
    os.close(word)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return Guard(waiting).launch()


def _wait(child: int, word: int) -> NoReturn:
    """Exits with the child's status if it ends before the run is under way. Ctrl-C is the child's meanwhile."""
    while True:
        try:
            said = os.read(word, 1 << 16)
            break
        except KeyboardInterrupt:
            os.kill(child, signal.SIGTERM)
    if not said:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        raise typer.Exit(status if status >= 0 else 128 - status)
    run = os.fsdecode(said)
    told = f"{run} is under way. To look on: paceline attach {run}; to end it: paceline stop {run}"
    Console(soft_wrap=True).print(told, markup=False, highlight=False)
    raise typer.Exit
