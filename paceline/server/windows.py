"""How much is under way, from a worker to a server and from a server to all workers."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, final

PIECES_UNDER_WAY = 4
"""How many pieces of full size a worker may have pushed to a server elsewhere and not have had answered, where updates
need every worker's gradient.

Connections share a link unevenly, and such a piece waits for the slowest worker's. So workers stay abreast, and a
server's link carries answers while it still carries gradients. ResNet-18 on 8 hosts at 1 Gbit/s, `ps-bsp`, medians of
three: 3.7 s a step with everything pushed at once and 2.9 s so with one server, 2.4 s and 1.9 s with two.
"""
LEAST_ANSWERS = 4
"""How many answers of full size a server may have under way, at least."""
UNDER_WAY_S = 0.3
"""What has arrived within so long may be under way, if that is more.

On a slow link that is few answers at a time. Else every worker is sent one at the same moment, and the connection on
which the host's own worker pushes to another server, which passes busy links at both ends, loses its packets and comes
last. On a fast link it is many: workers say that answers have come behind the pieces that they push.
"""

Sent = TypeVar("Sent")


@final
class SendWindow(Generic[Sent]):
    """Messages that go in order, and wait until earlier ones have been answered.

    Args:
        limit_bytes: what may be under way; a message that is larger goes alone.
    """

    def __init__(self, *, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self._unsent: deque[tuple[Sent, float]] = deque()
        self._under_way: deque[float] = deque()
        self._num_bytes = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    def put(self, message: Sent, num_bytes: float) -> None:
        """One more to send."""
        self._unsent.append((message, num_bytes))

    def take(self) -> Iterator[Sent]:
        """What may go now."""
        while self._unsent and (not self._under_way or self._num_bytes + self._unsent[0][1] <= self.limit_bytes):
            message, num_bytes = self._unsent.popleft()
            self._under_way.append(num_bytes)
            self._num_bytes += num_bytes
            yield message

    def withdraw(self, is_unwanted: Callable[[Sent], bool]) -> None:
        """Send these no more, if they have not been sent yet."""
        self._unsent = deque((message, num_bytes) for message, num_bytes in self._unsent if not is_unwanted(message))

    def answered(self) -> float:
        """The first that is under way is so no more; returns its bytes."""
        if not self._under_way:
            return 0.0
        num_bytes = self._under_way.popleft()
        self._num_bytes -= num_bytes
        return num_bytes


@final
class AnswerWindow(Generic[Sent]):
    """Answers of a server that go in order, and wait until workers have said that earlier ones have come.

    Args:
        least_bytes: what may be under way however slow the link is.
    """

    def __init__(self, *, least_bytes: float) -> None:
        self._least_bytes = least_bytes
        self._window: SendWindow[tuple[int, Sent]] = SendWindow(limit_bytes=least_bytes)
        self.under_way: Counter[int] = Counter()
        """Answers, by the worker that they are for."""
        self._arrived: deque[tuple[float, float]] = deque()  # when, and how many bytes, of late
        self._arrived_bytes = 0.0
        self._busy_since_s = 0.0

    @property
    def limit_bytes(self) -> float:
        """What may be under way now."""
        return self._window.limit_bytes

    def put(self, worker: int, answer: Sent, num_bytes: float) -> None:
        """One more to send."""
        self._window.put((worker, answer), num_bytes)

    def take(self, now_s: float) -> Iterator[tuple[int, Sent]]:
        """What may go now, and to whom."""
        if self._window.is_idle:  # and was so for want of answers, which says nothing of the link
            self._arrived.clear()
            self._arrived_bytes, self._busy_since_s = 0.0, now_s
        for worker, answer in self._window.take():
            self.under_way[worker] += 1
            yield worker, answer

    def answered(self, worker: int, now_s: float) -> bool:
        """This worker says that an answer has come; false, and nothing changes, where none is under way to it.

        Whoever says so, bytes are those of the first answer under way: all full pieces are alike.
        """
        if not self.under_way[worker]:
            return False
        self.under_way[worker] -= 1
        num_bytes = self._window.answered()
        self._arrived.append((now_s, num_bytes))
        self._arrived_bytes += num_bytes
        while self._arrived and self._arrived[0][0] <= now_s - UNDER_WAY_S:
            self._arrived_bytes -= self._arrived.popleft()[1]
        # What comes before so much time has passed can only show that there may be more under way than was thought.
        is_known = now_s - self._busy_since_s >= UNDER_WAY_S
        least_bytes = self._least_bytes if is_known else self._window.limit_bytes
        self._window.limit_bytes = max(least_bytes, self._arrived_bytes)
        return True

    def forget(self, worker: int) -> None:
        """Send this worker nothing more, and wait for no word from it."""
        self._window.withdraw(lambda sent: sent[0] == worker)
        for _ in range(self.under_way.pop(worker, 0)):
            self._window.answered()
