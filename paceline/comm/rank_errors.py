"""Errors that name ranks, and how the numbers of a group become those of the whole world."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

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


def disagreement(operations: Mapping[int, str]) -> TensorMismatch:
    """The error of ranks that ask for different operations: names the first, and the first that differs from it."""
    first, *others = sorted(operations)
    other = next(rank for rank in others if operations[rank] != operations[first])
    return TensorMismatch(
        f"ranks disagree on an operation: rank {first} asks for {operations[first]}, "
        f"rank {other} for {operations[other]}; every rank must make the same calls in the same order"
    )


def late(ranks: Sequence[int], operation: str, deadline_s: float | None) -> DeadlineExceeded:
    """The error of ranks that have not come to an operation in time; which they are may be unknown."""
    numbers = ", ".join(map(str, ranks))
    who = f"ranks {numbers} have" if len(ranks) > 1 else f"rank {numbers} has" if ranks else "a peer has"
    return DeadlineExceeded(
        f"{who} not taken part in {operation} within {deadline_s} s; see what keeps them, or give a longer deadline"
    )
