"""Workers as coroutines: exactly one runs at a time, from one wait to the next, and each has a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from greenlet import getcurrent, greenlet

from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.isolation.interpreter import Modes, modes, set_modes
from paceline.engines.virtual.isolation.random_state import RandomState
from paceline.engines.virtual.promise import Promise
from paceline.errors import Aborted, UsageError


@final
class Signal:
    """Something that happens once, which at most one process waits for."""

    def __init__(self) -> None:
        self.fired_s: float | None = None
        """When it happened."""
        self.turn = 0
        """Of the timeline, at which it happened."""
        self._listener: Callable[[float, int], None] | None = None

    def fire(self, timeline: EventQueue) -> None:
        """It happens now."""
        self.fired_s, self.turn = timeline.now_s, timeline.next_turn()
        if self._listener is not None:
            self._listener(self.fired_s, self.turn)

    def listen(self, listener: Callable[[float, int], None]) -> None:
        """Have it told the time and the turn, at once if it has happened."""
        self._listener = listener
        if self.fired_s is not None:
            listener(self.fired_s, self.turn)


@final
class Process:
    """One worker. It has a stack of its own, on which an unchanged script can wait at any depth.

    All processes share one thread: with a thread each, a gradient of the small conv net took twice as long, since
    memory, caches and torch's own threads are a thread's.

    Its clock may be ahead of the timeline: computing, and starting what does not have to be waited for, only move the
    clock, so that a step is computed in one go. Whatever another process could notice goes over the timeline.

    From one wait to the next it has one turn of the timeline, and knows of nothing that happened later than that: so it
    makes no difference when it is computed what it does in its turn.

    Args:
        runs_script: it has a random state of its own.
    """

    def __init__(self, scheduler: Scheduler, name: str, program: Callable[[], None], *, runs_script: bool) -> None:
        self.name = name
        self.waits_for: Callable[[], str] | None = None
        """What it cannot go on without, in words."""
        self.is_over = False
        self.doom: Aborted | None = None
        """Raised by the next wait."""
        self.random = RandomState() if runs_script else None
        self.modes = modes()
        self.turn = 0
        """The timeline's, in which it does what it does now."""
        self.promise = Promise()
        self._num_posted = 0
        self._scheduler, self.timeline = scheduler, scheduler.timeline
        self._clock_s = 0.0
        self._program = program
        self._greenlet = greenlet(self._run)

    @property
    def now_s(self) -> float:
        return max(self._clock_s, self.timeline.now_s)

    @property
    def is_running(self) -> bool:
        """Whether the caller is this process."""
        return getcurrent() is self._greenlet

    def advance(self, duration_s: float) -> None:
        """Only this process's clock moves on."""
        self._clock_s = self.now_s + duration_s

    def advance_to(self, time_s: float) -> None:
        """Only this process's clock moves on, to a time that it has come to elsewhere."""
        self._clock_s = max(self._clock_s, time_s)

    def before_exchange(self) -> None:
        """Called before it does anything that others could notice: its clock moves on to when it had promised to."""
        self.advance_to(self.promise.exchange(self.now_s))

    def after_exchange(self) -> None:
        """Called after it has waited for such a thing, with which a step may be done."""
        self.promise.answered(self.now_s)

    def post(self, action: Callable[..., object], *arguments: object) -> None:
        """Have something happen at this process's time."""
        self._num_posted += 1
        self.timeline.at_turn(self.now_s, self.turn, self._num_posted, action, *arguments)

    def has_seen(self, signal: Signal) -> bool:
        """Whether it was fired before this process's turn."""
        return signal.fired_s is not None and signal.turn < self.turn

    @property
    def may_wait(self) -> bool:
        """Whether it can be left where it is."""
        try:
            self._scheduler.require_waitable()
        except UsageError:
            return False
        return True

    def let_pass(self, *, until_s: float | None = None) -> None:
        """Let happen whatever comes before anything that this process can yet do in its turn.

        Args:
            until_s: when that may be, at the earliest; none: now.
        """
        if self.doom is None:
            self._num_posted += 1
            until_s = self.now_s if until_s is None else until_s
            self.timeline.at_turn(until_s, self.turn, self._num_posted, self._scheduler.go_on, self)
            self._scheduler.give_back()

    def wait(self, signal: Signal, what: Callable[[], str]) -> None:
        """Let others run until the signal has been fired, and the timeline has come to this process's time.

        What has been fired already is over by this process's clock too, and is not waited for.

        Raises:
            Aborted: the run is being ended.
        """
        if self.doom is not None:
            raise self.doom
        if self.has_seen(signal):
            return
        at_turn, resume = self.timeline.at_turn, self._scheduler.resume
        signal.listen(lambda time_s, turn: at_turn(max(self._clock_s, time_s), turn, 0, resume, self))
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

    def __init__(self, timeline: EventQueue, *, require_waitable: Callable[[], None]) -> None:
        self.timeline = timeline
        self.running: Process | None = None
        self.processes: list[Process] = []
        self.require_waitable = require_waitable
        self._own, self._own_modes = getcurrent(), modes()
        self._last: Process | None = None
        self._num_alive = 0

    def spawn(self, name: str, program: Callable[[], None], *, runs_script: bool = True) -> Process:
        """A process that begins with `run`; `program` must not raise."""
        process = Process(self, name, program, runs_script=runs_script)
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
        """Let a process have its next turn: it runs until it waits or is over."""
        process.turn = self.timeline.next_turn()
        self.go_on(process)

    def go_on(self, process: Process) -> None:
        """Let a process go on with its turn."""
        if process.is_over:
            return
        if process.random is not None and self._last is not process:
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
        self.require_waitable()
        self._own.switch()


def _change(present: Modes, wanted: Modes) -> None:
    """Seldom is there anything to change, and looking is quicker."""
    if present != wanted:
        set_modes(wanted)
