"""A queue whose jobs share what serves them."""

import heapq
import math
from typing import final

TINY = 1e-12


@final
class SharedQueue:
    """A processor-sharing queue, by the work that each of its jobs has been given so far."""

    def __init__(self) -> None:
        self.pace_s = TINY
        """Each job takes so long for one unit of work, until anything changes."""
        self._given = self._now_s = 0.0
        # Each: through at how much given, in which order it came, whose it is, whether it is a first part.
        self._jobs: list[tuple[float, int, int, bool]] = []
        self._num_entered = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def next_s(self) -> float:
        """When the next job is done, if nothing changes before."""
        if not self._jobs:
            return math.inf
        return self._now_s + max(0.0, self._jobs[0][0] - self._given) * self.pace_s

    def move_on(self, at_s: float) -> None:
        if self._jobs:
            self._given += max(0.0, at_s - self._now_s) / self.pace_s
        self._now_s = max(self._now_s, at_s)

    def enter(self, worker: int, size: float, *, is_first: bool = False) -> None:
        self._num_entered += 1
        heapq.heappush(self._jobs, (self._given + size, self._num_entered, worker, is_first))

    def leave(self) -> tuple[int, bool]:
        """Take out the job that is done next: whose it is, and whether it is a first part."""
        _, _, worker, is_first = heapq.heappop(self._jobs)
        return worker, is_first
