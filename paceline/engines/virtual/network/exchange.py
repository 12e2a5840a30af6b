"""A collective operation's messages on the network, each rank's from when it takes part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

from paceline.engines.virtual.network.links import Network
from paceline.engines.virtual.network.patterns import Pattern, Round


@final
class Exchange:
    """Moves a pattern's messages.

    Args:
        host_of: each rank's host.
        pattern: who sends what to whom.
        on_done: called with a rank when that one is through.
    """

    def __init__(
        self, network: Network, host_of: Sequence[int], pattern: Pattern, on_done: Callable[[int], None]
    ) -> None:
        self._network, self._host_of, self._pattern, self._on_done = network, host_of, pattern, on_done
        self.sent_bytes: dict[int, float] = {}
        """By each rank so far."""
        self._rounds: dict[int, Iterator[Round]] = {}
        self._arrived: dict[tuple[int, int], int] = {}  # messages by sender and receiver that no round has taken yet
        self._missing: dict[int, Sequence[int]] = {}  # what a rank's present round has yet to see

    def join(self, rank: int) -> None:
        """The rank takes part from now on."""
        self._rounds[rank] = self._pattern(rank)
        self.sent_bytes[rank] = 0.0
        self._go_on(rank)

    def _go_on(self, rank: int) -> None:
        """Enter rounds until one has to wait for a message."""
        rounds, arrived = self._rounds[rank], self._arrived
        host_of, send = self._host_of, self._network.send
        host = host_of[rank]
        for sends, receives, is_blocking in rounds:
            missing: list[int] = []
            for other, num_bytes in sends:
                if is_blocking:
                    missing.append(_sent_to(other))
                    send(host, host_of[other], num_bytes, self._arrive_and_tell, rank, other)
                else:
                    send(host, host_of[other], num_bytes, self._arrive, rank, other)
                self.sent_bytes[rank] += num_bytes
            for other in receives:
                pair = other, rank
                if arrived.get(pair):
                    arrived[pair] -= 1
                else:
                    missing.append(other)
            if missing:
                self._missing[rank] = missing
                return
        del self._rounds[rank]
        self._on_done(rank)

    def _arrive_and_tell(self, sender: int, receiver: int) -> None:
        self._arrive(sender, receiver)
        self._arrive(_sent_to(receiver), sender)

    def _arrive(self, sender: int, receiver: int) -> None:
        missing = self._missing.get(receiver)
        if missing is None or sender not in missing:
            self._arrived[sender, receiver] = self._arrived.get((sender, receiver), 0) + 1
        elif len(missing) == 1:
            del self._missing[receiver]
            self._go_on(receiver)
        else:
            self._missing[receiver] = [other for other in missing if other != sender]


def _sent_to(other: int) -> int:
    """What stands for word that a message to a rank has arrived, where ranks stand for messages from them."""
    return -1 - other
