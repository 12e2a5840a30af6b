"""The messages of one collective operation."""

from collections.abc import Callable, Iterator, Sequence
from typing import final

from paceline.engines.virtual.network.links import Network
from paceline.engines.virtual.network.patterns import Pattern, Round


@final
class Exchange:
    """Sends a pattern's messages; each rank sends its own once it takes part. `on_done` is told when its last round is
    over."""

    def __init__(
        self, network: Network, host_of: Sequence[int], pattern: Pattern, on_done: Callable[[int], None]
    ) -> None:
        self._network, self._host_of, self._pattern, self._on_done = network, host_of, pattern, on_done
        self.sent_bytes: dict[int, float] = {}
        self._rounds: dict[int, Iterator[Round]] = {}
        self._arrived: dict[tuple[int, int], int] = {}  # by sender and receiver: what no round took yet
        self._missing: dict[int, Sequence[int]] = {}  # those that a rank's present round has yet to hear from

    def join(self, rank: int) -> None:
        self._rounds[rank] = self._pattern(rank)
        self.sent_bytes[rank] = 0.0
        self._go_on(rank)

    def _go_on(self, rank: int) -> None:
        """Enter one round after the other until one has to wait for a message."""
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
    """The number by which a sender waits for its message to a rank to arrive; ranks stand for messages from them."""
    return -1 - other
