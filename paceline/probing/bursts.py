"""What small messages between two hosts take: one by itself, and each of a burst, as a worker sends its peers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore, Store

from paceline.comm.base import Collective
from paceline.comm.process_group.collective import connect_gloo
from paceline.probing.timing import core_s, mean_s

BURST = 7
"""Messages at a time, as many as each of eight workers sends in a coded average."""
_NUM_SWAPS = 40


class Way(NamedTuple):
    """To the other rank."""

    collective: Collective
    other: int
    """The other's rank in it."""


@dataclass(frozen=True)
class MessageCost:
    """What it costs two ranks to send each other messages of 4 bytes at the same time."""

    message_s: float
    """Seconds of one each, as in a round of an all-reduce."""
    burst_s: float
    """Seconds of `BURST` each, posted one right after the other."""
    message_core_s: float
    """Processor time of one end, of a message sent and one received, with caches that hold other things."""
    burst_core_s: float
    """The same of `BURST` messages sent, and as many received."""


@contextmanager
def peers(store: Store, swap: Callable[[str], str], *, address: str, is_first: bool) -> Iterator[list[Way]]:
    """As many ways to the other rank as there are messages in a burst, each with connections and threads of its own, as
    a worker has for each of its peers: over one way a burst takes half of a core's time. Both ranks call it at the same
    time.

    Args:
        store: where the two meet, and nobody else.
        swap: gives the other rank a text for its own.
        address: of this rank's host.
        is_first: the other rank says the reverse.
    """
    groups = [
        connect_gloo(PrefixStore(f"{number}", store), rank=int(not is_first), size=2, address=address)
        for number in range(BURST)
    ]
    try:
        yield [Way(group, int(is_first)) for group in groups]
        swap("over")
    finally:
        for group in groups:
            group.close()


def measure(way: Way, others: Sequence[Way]) -> MessageCost:
    """Both ranks measure at the same time, which is as often: `others` are `BURST` ways."""
    one, burst = partial(_swap, [way]), partial(_swap, others)
    for action in (one, burst):
        action()
    return MessageCost(
        message_s=mean_s(one, _NUM_SWAPS),
        burst_s=mean_s(burst, _NUM_SWAPS),
        message_core_s=core_s(one, _NUM_SWAPS),
        burst_core_s=core_s(burst, _NUM_SWAPS),
    )


def _swap(ways: Sequence[Way]) -> None:
    theirs, mine = torch.zeros(2, len(ways), 1)
    works = [way.collective.recv(word, source=way.other) for way, word in zip(ways, theirs, strict=True)]
    works += [way.collective.send(word, destination=way.other) for way, word in zip(ways, mine, strict=True)]
    for work in works:
        work.wait()
