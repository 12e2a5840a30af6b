"""How much a worker has under way to one server."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar, final

PIECES_UNDER_WAY = 4
"""Of full size, that a worker has pushed to a server elsewhere and that are not answered, where updates need every
worker's gradient.

Connections share a link unevenly, and such a piece waits for the slowest worker's. So workers stay abreast, and a
server's link carries answers while it still carries gradients. ResNet-18 on 8 hosts at 1 Gbit/s, `ps-bsp`, medians of
three: 3.7 s a step with everything pushed at once and 2.9 s so with one server, 2.4 s and 1.9 s with two.
"""

Request = TypeVar("Request")


@final
class SendWindow(Generic[Request]):
    """Requests of one exchange with one server: the next may go when earlier ones are answered, in their order.

    Args:
        limit_bytes: what may be under way; a request that is larger goes alone.
    """

    def __init__(self, *, limit_bytes: float) -> None:
        self._limit_bytes = limit_bytes
        self._unsent: deque[tuple[Request, float]] = deque()
        self._under_way: deque[float] = deque()
        self._num_bytes = 0.0

    def put(self, request: Request, num_bytes: float) -> None:
        """One more to send."""
        self._unsent.append((request, num_bytes))

    def take(self) -> Iterator[Request]:
        """Those that may go now."""
        while self._unsent and (not self._under_way or self._num_bytes + self._unsent[0][1] <= self._limit_bytes):
            request, num_bytes = self._unsent.popleft()
            self._under_way.append(num_bytes)
            self._num_bytes += num_bytes
            yield request

    def answered(self) -> None:
        """The first that is under way is so no more."""
        if self._under_way:
            self._num_bytes -= self._under_way.popleft()
