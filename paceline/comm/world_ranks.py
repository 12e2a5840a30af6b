"""Errors of a group of ranks, which calls them by their numbers in the group, in the numbers of the whole world."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

from paceline.comm.base import Work
from paceline.errors import Aborted, DeadlineExceeded, PeerLost, TensorMismatch

FAILURES = (PeerLost, DeadlineExceeded, Aborted, TensorMismatch)
"""What ends a collective, unlike a mistake in the arguments of a call."""
_RANKS = re.compile(r"(?<!world )\b(ranks?) (\d+(?:, \d+)*)")


def in_world(message: str, ranks: Sequence[int]) -> str:
    """The message with the world's numbers; what already says `world rank` stays.

    Args:
        ranks: the world's number of each rank of the group.

    >>> in_world("ranks 0, 1 have left: world rank 0 is lost", [4, 5])
    'world ranks 4, 5 have left: world rank 0 is lost'
    """

    def renumbered(match: re.Match[str]) -> str:
        numbers = [int(number) for number in match[2].split(", ")]
        if max(numbers) >= len(ranks):
            return match[0]
        return f"world {match[1]} {', '.join(str(ranks[number]) for number in numbers)}"

    return _RANKS.sub(renumbered, message)


@contextmanager
def naming(ranks: Sequence[int]) -> Iterator[None]:
    """Raise the group's failures from inside with the world's numbers."""
    try:
        yield
    except FAILURES as error:
        raise type(error)(in_world(str(error), ranks)) from None


@final
class NamedWork(Work):
    """Work of a group."""

    def __init__(self, work: Work, ranks: Sequence[int]) -> None:
        self._work = work
        self._ranks = ranks

    def poll(self) -> bool:
        with naming(self._ranks):
            return self._work.poll()

    def wait(self) -> None:
        with naming(self._ranks):
            self._work.wait()
