"""When workers have computed: those whose hosts share a core are at it at the same time, and slow each other down."""

import heapq
import math
from typing import NamedTuple, final

from paceline.planner.draws import Draws
from paceline.planner.setting import Setting
from paceline.planner.shared_queue import SharedQueue


@final
class Computed(NamedTuple):
    at_s: float
    worker: int


class _Due(NamedTuple):
    at_s: float
    number: int
    worker: int
    steps_left: int
    """0: it has computed."""


@final
class Computing:
    """Some workers compute so many steps each, as they are told. Before each step a worker does what needs no core."""

    def __init__(self, setting: Setting, draws: Draws) -> None:
        self._draws, self._rest_s = draws, setting.work.overhead_s
        cores: list[int] = setting.cores.tolist()
        shared = {core for core in cores if core < setting.cluster.num_hosts} if setting.takes_turns else set()
        queues = {core: SharedQueue() for core in shared}
        self._queues = list(queues.values())
        self._queue_of = [queues.get(core) for core in cores]
        self._steps_left = [0] * len(cores)
        self._due: list[_Due] = []
        self._num_due = 0

    def begin(self, worker: int, at_s: float, *, num_steps: int) -> None:
        """The worker takes up so many steps at this time, which is not before anything that has happened."""
        if self._queue_of[worker] is None:
            computed_s = at_s + num_steps * self._rest_s + self._draws.next_s(worker, num_steps=num_steps)
            self._await(worker, computed_s, steps_left=0)
        else:
            self._await(worker, at_s + self._rest_s, steps_left=num_steps)

    @property
    def next_s(self) -> float:
        """When something happens next."""
        due_s = self._due[0].at_s if self._due else math.inf
        return min(due_s, min((queue.next_s for queue in self._queues), default=math.inf))

    def go_on(self) -> Computed | None:
        """Let that happen. Returns who has computed all its steps; none: nobody has yet."""
        now_s = self.next_s
        if self._due and self._due[0].at_s <= now_s:
            _, _, worker, steps_left = heapq.heappop(self._due)
            queue = self._queue_of[worker]
            if queue is None or not steps_left:
                return Computed(now_s, worker)
            self._steps_left[worker] = steps_left
            queue.move_on(now_s)
            queue.enter(worker, self._draws.needed_s(worker))
        else:
            queue = min(self._queues, key=lambda each: each.next_s)
            queue.move_on(now_s)
            worker, _ = queue.leave()
            if self._steps_left[worker] == 1:
                self._share(queue)
                return Computed(now_s, worker)
            self._await(worker, now_s + self._rest_s, steps_left=self._steps_left[worker] - 1)
        self._share(queue)
        return None

    def _await(self, worker: int, at_s: float, *, steps_left: int) -> None:
        self._num_due += 1
        heapq.heappush(self._due, _Due(at_s, self._num_due, worker, steps_left))

    def _share(self, queue: SharedQueue) -> None:
        queue.pace_s = float(max(1, len(queue)))
