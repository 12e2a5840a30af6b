"""What scripts find around them while they are simulated: output, time and random state of their own."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import final

from paceline.engines.virtual.computing.backward import BackwardEnds
from paceline.engines.virtual.isolation import interpreter, labels
from paceline.engines.virtual.isolation.output import OutputByLine
from paceline.engines.virtual.process import Scheduler


@final
class Surroundings:
    """The surroundings of all scripts of a run; `say` gets a worker's name and a line that it has printed."""

    def __init__(self, scheduler: Scheduler, backward: BackwardEnds, say: Callable[[str, str], None]) -> None:
        self._scheduler, self._backward, self._say_line = scheduler, backward, say
        self._is_saying = False
        self._pid = os.getpid()
        self._out, self._err = (OutputByLine(self._who, self._say, own) for own in (sys.stdout, sys.stderr))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace what scripts find; put everything back at the end."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._out.retire)
            stack.callback(self._err.retire)
            stack.enter_context(interpreter.kept())
            stack.enter_context(interpreter.sleeping(self._sleep))
            stack.enter_context(self._backward.in_place())
            stack.enter_context(contextlib.redirect_stdout(self._out))
            stack.enter_context(contextlib.redirect_stderr(self._err))
            stack.enter_context(labels.only_where_seen())
            yield

    @contextlib.contextmanager
    def not_heard(self) -> Iterator[None]:
        """What is printed in here is the launcher's, not the running worker's."""
        before, self._is_saying = self._is_saying, True
        try:
            yield
        finally:
            self._is_saying = before

    def _who(self) -> str | None:
        """The worker that prints; none in processes that a script has forked, as loaders do."""
        running = self._scheduler.running
        if running is None or self._is_saying or os.getpid() != self._pid:
            return None
        return running.name

    def _say(self, who: str, line: str) -> None:
        with self.not_heard():
            self._say_line(who, line)

    def _sleep(self, duration_s: float) -> bool:
        """Let the running worker sleep; false where the caller is none."""
        process = self._scheduler.running
        if process is None or not process.is_running:
            return False
        process.advance(max(0.0, duration_s))
        return True
