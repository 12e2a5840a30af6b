"""Cores that simulated hosts share: what computes on one, and what handles messages there, takes turns."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from paceline.engines.virtual.events import EventQueue

SLICE_S = 1.4e-3
"""Who has begun to want a core does not lose it before it has had so much: the least slice of Linux' scheduler on two
cores (EEVDF: Stoica and Abdel-Wahab, "Earliest eligible virtual deadline first", 1995)."""
TICK_S = 4e-3
"""How often the kernel looks whether others wait (250 Hz); else it does so when somebody comes."""


@final
class Core:
    """Serves its threads in turns. Who comes is served at once, and at the clock's ticks it is the next one's turn, but
    not before the present one has had a slice since it came.

    It is never idle while there is work: k threads with W seconds of work between them are done after W. A thread that
    is the only one has the core to itself.
    """

    def __init__(self, timeline: EventQueue, *, slice_s: float = SLICE_S, tick_s: float = TICK_S) -> None:
        self._timeline, self._slice_s, self._tick_s = timeline, slice_s, tick_s
        self._turns: deque[Thread] = deque()
        """The first one is at it."""
        self._since_s = 0.0
        """The time up to which its work has been counted."""
        self._num_plans = 0
        self._is_between = False

    def wake(self, thread: "Thread") -> None:
        """The thread has work again."""
        thread.had_s = 0.0
        if not self._is_between and self._turns and self._is_out_of_slice():
            self._turns.appendleft(thread)
        else:
            self._turns.append(thread)
        if not self._is_between:
            self._plan()

    def _plan(self) -> None:
        """Come back when the job is done or, where others wait, when the clock ticks."""
        now_s = self._since_s = self._timeline.now_s
        end_s, action = now_s + self._turns[0].left_s, self._finish
        if len(self._turns) > 1:
            number = int(now_s / self._tick_s)
            while number * self._tick_s <= now_s:
                number += 1
            if number * self._tick_s < end_s:
                end_s, action = number * self._tick_s, self._tick
        self._num_plans += 1
        self._timeline.at(end_s, action, self._num_plans)

    def _tick(self, plan: int) -> None:
        if plan == self._num_plans:  # else somebody has come meanwhile
            if self._is_out_of_slice():
                self._turns.rotate(-1)
            self._plan()

    def _finish(self, plan: int) -> None:
        if plan != self._num_plans:
            return
        self._turns[0].had_s += self._timeline.now_s - self._since_s
        self._is_between = True
        self._turns[0].finish()
        self._is_between = False
        if not self._turns[0].has_work:
            self._turns.popleft()
        if self._turns:
            self._plan()

    def _is_out_of_slice(self) -> bool:
        """Whether the present one may lose the core, once its work has been counted."""
        thread = self._turns[0]
        thread.work(self._timeline.now_s - self._since_s)
        return thread.had_s >= self._slice_s


@dataclass(slots=True)
class _Job:
    left_s: float
    action: Callable[..., object]
    arguments: tuple[Any, ...]


@final
class Thread:
    """Does its jobs one after the other, whenever its core serves it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.had_s = 0.0
        """How much of its core's time it had since it last began to want it."""
        self._jobs: deque[_Job] = deque()
        self._is_at_work = False

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    @property
    def left_s(self) -> float:
        """What is left of its present job."""
        return self._jobs[0].left_s

    def run(self, work_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have `action(*arguments)` called when the core has worked so long on this, after the jobs before it."""
        is_idle = not self._jobs and not self._is_at_work
        self._jobs.append(_Job(work_s, action, arguments))
        if is_idle:
            self._core.wake(self)

    def work(self, part_s: float) -> None:
        """The core has worked on the present job."""
        self.had_s += part_s
        self._jobs[0].left_s = max(0.0, self._jobs[0].left_s - part_s)

    def finish(self) -> None:
        """The present job is done. What this begins goes on without a break."""
        job = self._jobs.popleft()
        self._is_at_work = True
        job.action(*job.arguments)
        self._is_at_work = False
