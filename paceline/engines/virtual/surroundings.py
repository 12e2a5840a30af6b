"""What scripts find around them while they are simulated: their own output, time and random state."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import final

from paceline.engines.virtual import interpreter
from paceline.engines.virtual.backward import BackwardEnds
from paceline.engines.virtual.output import OutputByLine
from paceline.engines.virtual.process import Scheduler


@final
class Surroundings:
    """Of all scripts of this process.

    Args:
        say: is given each line that a worker prints, and who that is.
    """

    def __init__(self, scheduler: Scheduler, backward: BackwardEnds, say: Callable[[str, str], None]) -> None:
        self._scheduler, self._backward, self._say_line = scheduler, backward, say
        self._is_saying = False

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """All is as before at the end."""
        out = OutputByLine(self._who, self._say, sys.stdout)
        err = OutputByLine(self._who, self._say, sys.stderr)
        with interpreter.kept(), interpreter.sleeping(self._sleep), self._backward.in_place():
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                yield
            out.finish()
            err.finish()

    @contextlib.contextmanager
    def not_heard(self) -> Iterator[None]:
        """What is printed in here is not what the worker prints that runs."""
        before, self._is_saying = self._is_saying, True
        try:
            yield
        finally:
            self._is_saying = before

    def _who(self) -> str | None:
        running = self._scheduler.running
        return running.name if running is not None and not self._is_saying else None

    def _say(self, who: str, line: str) -> None:
        with self.not_heard():
            self._say_line(who, line)

    def _sleep(self, duration_s: float) -> bool:
        """A script's sleep: a wait for nothing but its end."""
        process = self._scheduler.running
        if process is None or not process.is_running:
            return False
        process.advance(max(0.0, duration_s))
        return True
