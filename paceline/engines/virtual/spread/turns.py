"""Whose turn it is in a crew."""

from __future__ import annotations

import heapq
from typing import final

from paceline.engines.virtual.spread.channel import Channel

GO = 0xFFFFFFFF
"""To a crew, in place of a worker's number: nobody is to say something before something has been computed."""
BUSY = 0x80000000
"""With a worker's number: from a crew, it says until when it computes; to a crew, that is known, and it need not."""


@final
class Turns:
    """Those who have been answered come before those who have a batch to compute.

    An answered worker soon says until when it computes, unless that is known, and with that the simulation goes on. So
    who has said it is left there, and goes on when the simulation waits for something that has to be computed
    (`Crew.receive`), and then as long as nobody is answered who says something soon.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._left: list[tuple[float, int]] = []
        self._is_going = False

    def leave(self, rank: int, until_s: float) -> None:
        """A worker has a step to compute that others wait for at `until_s`."""
        heapq.heappush(self._left, (until_s, rank))

    def next(self) -> tuple[int, bytes | None]:
        """A worker, and what it is answered; none: it goes on with its step. Waits for it.

        Raises:
            EOFError: the simulation is over.
        """
        while True:
            frame = self._channel.poll() if self._is_going and self._left else self._channel.receive()
            if frame is None:
                return heapq.heappop(self._left)[1], None
            number, content = frame
            if number == GO:
                self._is_going = True
                continue
            self._is_going = self._is_going and bool(number & BUSY)
            return number & ~BUSY, content
