"""Workers as coroutines: one runs at a time, until it waits, and each has a clock of its own."""

import math
import threading
from collections.abc import Callable
from typing import final

from greenlet import getcurrent, greenlet

from paceline.cluster.worker_costs import Cost, WorkerCosts
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.isolation.interpreter import Modes, modes, set_modes
from paceline.engines.virtual.isolation.random_state import RandomState
from paceline.engines.virtual.lead import Lead
from paceline.errors import PacelineError, UsageError


@final
class Signal:
    """Something that happens once. At most one process waits for it."""

    def __init__(self) -> None:
        self.fired_s: float | None = None
        self.on_fire: Callable[[], None] | None = None

    def fire(self, timeline: EventQueue) -> None:
        self.fired_s = timeline.now_s
        if self.on_fire is not None:
            self.on_fire()


@final
class Process:
    """One worker, with a stack of its own, so that an unchanged script can wait at any depth of its calls.

    All processes share one thread. With a thread each, a gradient took twice as long: caches and torch's own threads
    belong to a thread.

    A process's clock may be ahead of the timeline: computing moves only this clock, so a whole step is computed in one
    go. Whatever another process can notice is posted to the timeline at this clock's time. With a `lead` it computes on
    a core that others want, too: until it has caught up, its clock says when it would be done if it were alone.
    """

    def __init__(self, scheduler: "Scheduler", name: str, program: Callable[[], None]) -> None:
        self.name = name
        self.waits_for: Callable[[], str] | None = None
        """Says what it waits for; none while it runs."""
        self.is_over = False
        self.doom: PacelineError | None = None
        """What its present wait, and every later one, raises."""
        self.is_dead = False
        """What it was about to do when it died does not happen."""
        self.random, self.modes = RandomState(), modes()
        self.timeline = scheduler.timeline
        self.lead: Lead | None = None
        self._scheduler = scheduler
        self._clock_s = 0.0
        self._sent_s = -math.inf
        """When it had sent its last message."""
        self._program = program
        self._greenlet = greenlet(self._run)

    @property
    def now_s(self) -> float:
        return max(self._clock_s, self.timeline.now_s)

    @property
    def is_running(self) -> bool:
        return getcurrent() is self._greenlet

    def advance(self, duration_s: float) -> None:
        self._clock_s = self.now_s + duration_s
        if self.lead is not None and self.lead.is_under_way:
            self.lead.rest(duration_s)

    def compute(self, duration_s: float) -> None:
        """Need a core for so long."""
        if self.lead is None or not duration_s:
            self.advance(duration_s)
            return
        self.lead.compute(duration_s, from_s=self._clock_s)
        self._clock_s = self.now_s + duration_s

    def take(self, cost: Cost) -> float:
        """Take as long as something costs a worker; returns its seconds."""
        duration_s = cost.time_s
        if self.lead is not None:
            self.compute(cost.core_s)
            duration_s = max(0.0, duration_s - cost.core_s)
        self.advance(duration_s)
        return cost.time_s

    def send_off(self, costs: WorkerCosts) -> float:
        """Take as long as it takes to send a message; returns its seconds. A message that is sent as soon as the one
        before has left belongs to the same burst, and costs less."""
        is_further = self.now_s == self._sent_s
        taken_s = self.take(costs.further_message if is_further else costs.message)
        self._sent_s = self.now_s
        return taken_s

    def post(self, action: Callable[..., object], *arguments: object) -> None:
        """Have `action(*arguments)` called at this process's time."""
        if self.lead is not None and self.lead.is_under_way:
            self.lead.act(self._act, action, *arguments)
        else:
            self.timeline.at(self._clock_s, self._act, action, *arguments)

    def _act(self, action: Callable[..., object], *arguments: object) -> None:
        if not self.is_dead:
            action(*arguments)

    def settle(self) -> None:
        """Let others run until the timeline has come to this process's time."""
        here = Signal()
        self.post(here.fire, self.timeline)
        self.wait(here, lambda: "its own time")

    def catch_up(self) -> float:
        """The time, once the core has done what this process has computed. Within a backward pass, where nothing can
        be waited for, it is what it would be if the process were alone."""
        if self.lead is not None and self.lead.is_under_way and self._scheduler.can_wait():
            self.settle()
        return self.now_s

    def wait(self, signal: Signal, what: Callable[[], str]) -> None:
        """Let others run until the signal has been fired and the timeline has come to this process's time.

        Returns at once for a signal that has been fired already. Raises the error with which the run is being
        ended, or UsageError in a backward pass.
        """
        if self.doom is not None:
            raise self.doom
        if signal.fired_s is not None:
            return
        signal.on_fire = lambda: self.post(self._scheduler.resume, self)
        self.waits_for = what
        self._scheduler.give_back()
        self.waits_for = None
        if self.doom is not None:
            raise self.doom

    def switch_to(self) -> None:
        """Run this process until it waits or is over. Only the scheduler calls this."""
        self._greenlet.switch()

    def _run(self) -> None:
        try:
            if self.doom is None:
                self._program()
        finally:
            self.is_over = True


@final
class Scheduler:
    """Lets events happen and processes run, one at a time. Before one waits, `require_waitable` raises UsageError
    unless `can_wait`."""

    def __init__(
        self,
        timeline: EventQueue,
        *,
        require_waitable: Callable[[], None],
        can_wait: Callable[[], bool] = lambda: True,
    ) -> None:
        self.timeline, self.can_wait = timeline, can_wait
        self.running: Process | None = None
        self.processes: list[Process] = []
        self._require_waitable = require_waitable
        self._own, self._own_modes = getcurrent(), modes()
        self._thread = threading.get_ident()
        self._last: Process | None = None
        self._num_alive = 0

    def spawn(self, name: str, program: Callable[[], None]) -> Process:
        """Make a process that begins with `run`; `program` must not raise."""
        process = Process(self, name, program)
        self.processes.append(process)
        self._num_alive += 1
        self.timeline.at(self.timeline.now_s, self.resume, process)
        return process

    def run(self) -> None:
        """Return when every process is over, or when nothing can happen any more for those that still wait."""
        self._own, self._own_modes = getcurrent(), modes()
        self._thread = threading.get_ident()
        self.timeline.run()

    def abort(self, error: PacelineError) -> None:
        """End every process: its present wait, and any later one, raises this."""
        for process in self.processes:
            process.doom = process.doom or error
        for process in self.processes:
            while not process.is_over:
                self.resume(process)

    def end(self, process: Process, error: PacelineError) -> None:
        """End one process, as if its host had died: the others go on."""
        process.doom, process.is_dead = process.doom or error, True
        while not process.is_over:
            self.resume(process)

    def resume(self, process: Process) -> None:
        """Run a process until it waits or is over."""
        if process.is_over:
            return
        if self._last is not process:
            present = self._last.random if self._last is not None else None
            if present is not None:
                present.save()
            process.random.restore(present)
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
        """Leave the process that calls this until it is resumed. Raises UsageError where it cannot be left."""
        if threading.get_ident() != self._thread:
            raise UsageError(
                "on the virtual engine nothing can be waited for in a thread that the script has started; call "
                "backward(), and whatever else waits for other workers, in the script's own thread"
            )
        self._require_waitable()
        self._own.switch()


def _change(present: Modes, wanted: Modes) -> None:
    if present != wanted:  # setting them takes longer than comparing, and they seldom differ
        set_modes(wanted)
