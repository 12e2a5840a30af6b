"""Workers as coroutines: exactly one runs at a time, from one wait to the next, and each has a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from greenlet import getcurrent, greenlet

from paceline.engines.virtual.interpreter import Modes, RandomState, modes, set_modes
from paceline.engines.virtual.timeline import Timeline
from paceline.errors import Aborted


@final
class Signal:
    """Something that happens once, which at most one process waits for."""

    def __init__(self) -> None:
        self.fired_s: float | None = None
        """When it happened."""
        self._listener: Callable[[], None] | None = None

    def fire(self, now_s: float) -> None:
        self.fired_s = now_s
        if self._listener is not None:
            self._listener()

    def listen(self, listener: Callable[[], None]) -> None:
        self._listener = listener


@final
class Process:
    """One worker. It has a stack of its own, on which an unchanged script can wait at any depth.

    All processes share one thread: with a thread each, a gradient of the small conv net took twice as long, since
    memory, caches and torch's own threads are a thread's.

    Its clock may be ahead of the timeline: computing, and starting what does not have to be waited for, only move the
    clock, so that a step is computed in one go. Whatever another process could notice goes over the timeline.
    """

    def __init__(self, scheduler: Scheduler, name: str, program: Callable[[], None]) -> None:
        self.name = name
        self.waits_for: Callable[[], str] | None = None
        """What it cannot go on without, in words."""
        self.is_over = False
        self.doom: Aborted | None = None
        """Raised by the next wait."""
        self.random, self.modes = RandomState(), modes()
        self._scheduler, self._timeline = scheduler, scheduler.timeline
        self._clock_s = 0.0
        self._program = program
        self._greenlet = greenlet(self._run)

    @property
    def now_s(self) -> float:
        return max(self._clock_s, self._timeline.now_s)

    @property
    def timeline_now_s(self) -> float:
        """The time that has come for all."""
        return self._timeline.now_s

    @property
    def is_running(self) -> bool:
        """Whether the caller is this process."""
        return getcurrent() is self._greenlet

    def advance(self, duration_s: float) -> None:
        """Only this process's clock moves on."""
        self._clock_s = self.now_s + duration_s

    def post(self, action: Callable[..., object], *arguments: object) -> None:
        """Have something happen at this process's time."""
        self._timeline.at(self.now_s, action, *arguments)

    def wait(self, signal: Signal, what: Callable[[], str]) -> None:
        """Let others run until the signal has been fired, and the timeline has come to this process's time.

        What has been fired already is over by this process's clock too, and is not waited for.

        Raises:
            Aborted: the run is being ended.
        """
        if self.doom is not None:
            raise self.doom
        if signal.fired_s is not None:
            return
        timeline, resume = self._timeline, self._scheduler.resume
        signal.listen(lambda: timeline.at(max(self._clock_s, timeline.now_s), resume, self))
        self.waits_for = what
        self._scheduler.give_back()
        self.waits_for = None
        if self.doom is not None:
            raise self.doom

    def switch_to(self) -> None:
        """Called by the scheduler alone: returns when this process waits or is over."""
        self._greenlet.switch()

    def _run(self) -> None:
        try:
            if self.doom is None:
                self._program()
        finally:
            self.is_over = True


@final
class Scheduler:
    """Lets events happen and processes run, one thing at a time.

    Args:
        require_waitable: called before a process waits; raises where it cannot be left.
    """

    def __init__(self, timeline: Timeline, *, require_waitable: Callable[[], None]) -> None:
        self.timeline = timeline
        self.running: Process | None = None
        self.processes: list[Process] = []
        self._require_waitable = require_waitable
        self._own, self._own_modes = getcurrent(), modes()
        self._last: Process | None = None
        self._num_alive = 0

    def spawn(self, name: str, program: Callable[[], None]) -> Process:
        """A process that begins with `run`; `program` must not raise."""
        process = Process(self, name, program)
        self.processes.append(process)
        self._num_alive += 1
        self.timeline.at(self.timeline.now_s, self.resume, process)
        return process

    def run(self) -> None:
        """Until every process is over, or nothing can happen any more: those left wait for something impossible."""
        self._own, self._own_modes = getcurrent(), modes()
        self.timeline.run()

    def abort(self, reason: str) -> None:
        """Have every process end: its present wait, and any later one, raises `Aborted`."""
        for process in self.processes:
            process.doom = process.doom or Aborted(reason)
        for process in self.processes:
            while not process.is_over:
                self.resume(process)

    def resume(self, process: Process) -> None:
        """Let a process run until it waits or is over."""
        if process.is_over:
            return
        if self._last is not process:
            last = self._last.random if self._last is not None else None
            if last is not None:
                last.save()
            process.random.restore(last)
            self._last = process
        _change(self._own_modes, process.modes)
        self.running = process
        try:
            process.switch_to()
        finally:
            self.running = None
            process.modes = modes()
            _change(process.modes, self._own_modes)
            self._num_alive -= process.is_over
            if not self._num_alive:
                self.timeline.stop()

    def give_back(self) -> None:
        """Called by the process that runs, which goes no further before it is resumed."""
        self._require_waitable()
        self._own.switch()


def _change(present: Modes, wanted: Modes) -> None:
    """Seldom is there anything to change, and looking is quicker."""
    if present != wanted:
        set_modes(wanted)
