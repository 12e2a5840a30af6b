"""How much of what a server answers is under way to all workers together."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, final

from paceline.comm.servers.send_window import SendWindow

LEAST_ANSWERS = 4
"""Of full size, that may be under way."""
UNDER_WAY_S = 0.3
"""What has arrived within so long may be under way, if that is more.

On a slow link that is few answers at a time. Else every worker is sent one at the same moment, and the connection on
which the host's own worker pushes to another server, which passes busy links at both ends, loses its packets and comes
last. On a fast link it is many: workers say that answers have come behind the pieces that they push.
"""

Answer = TypeVar("Answer")


@final
class AnswerWindow(Generic[Answer]):
    """Answers of a server that go in order, and wait until workers have said that earlier ones have come.

    Args:
        now_s: a clock.
        least_bytes: what may be under way however slow the link is.
    """

    def __init__(self, now_s: Callable[[], float], *, least_bytes: float) -> None:
        self._now_s, self._least_bytes = now_s, least_bytes
        self._window: SendWindow[tuple[int, Answer]] = SendWindow(limit_bytes=least_bytes)
        self._under_way: Counter[int] = Counter()  # answers, by the worker that they are for
        self._arrived: deque[tuple[float, float]] = deque()
        """When, and how many bytes, of late."""
        self._arrived_bytes = 0.0
        self._busy_since_s = 0.0

    @property
    def limit_bytes(self) -> float:
        """What may be under way now."""
        return self._window.limit_bytes

    def put(self, worker: int, answer: Answer, num_bytes: float) -> None:
        """One more to send."""
        self._window.put((worker, answer), num_bytes)

    def take(self) -> Iterator[tuple[int, Answer]]:
        """Those that may go now, and to whom."""
        if self._window.is_idle:  # and was so for want of answers, which says nothing of the link
            self._arrived.clear()
            self._arrived_bytes, self._busy_since_s = 0.0, self._now_s()
        for worker, answer in self._window.take():
            self._under_way[worker] += 1
            yield worker, answer

    def answered(self, worker: int) -> bool:
        """This worker says that an answer has come; false, and nothing changes, where none is under way to it.

        Whoever says so, bytes are those of the first answer under way: all full pieces are alike.
        """
        if not self._under_way[worker]:
            return False
        self._under_way[worker] -= 1
        now_s, num_bytes = self._now_s(), self._window.answered()
        self._arrived.append((now_s, num_bytes))
        self._arrived_bytes += num_bytes
        while self._arrived and self._arrived[0][0] <= now_s - UNDER_WAY_S:
            self._arrived_bytes -= self._arrived.popleft()[1]
        # What comes before so much time has passed can only show that there may be more under way than was thought.
        is_known = now_s - self._busy_since_s >= UNDER_WAY_S
        least_bytes = self._least_bytes if is_known else self._window.limit_bytes
        self._window.limit_bytes = max(least_bytes, self._arrived_bytes)
        return True
