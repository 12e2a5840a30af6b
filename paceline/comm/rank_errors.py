"""Errors that name ranks."""

from collections.abc import Mapping, Sequence

from paceline.errors import Aborted, CallMismatch, DeadlineExceeded, PacelineError, PeerLost, TensorMismatch

FAILURES = (PeerLost, DeadlineExceeded, Aborted, TensorMismatch)
"""What ends a collective, unlike a mistake in the arguments of a call."""
ALIKE = (
    "every rank must make the same calls in the same order, and leave out a batch or a step only where all do, "
    "as where worker.all_reduce has given all the same loss (inside `with worker.meeting(...)`, where the strategy "
    "refuses it in the loop)"
)


def is_of_calls(error: PacelineError) -> bool:
    """Whether ranks make different calls: found by this rank, or by one that has left for it."""
    return isinstance(error, CallMismatch) or (isinstance(error, PeerLost) and ALIKE.partition(",")[0] in str(error))


def disagreement(operations: Mapping[int, str]) -> CallMismatch:
    """The error of ranks that ask for different operations: names the first, and the first that differs from it."""
    first, *others = sorted(operations)
    other = next(rank for rank in others if operations[rank] != operations[first])
    return CallMismatch(
        f"ranks disagree on an operation: rank {first} asks for {operations[first]}, "
        f"rank {other} for {operations[other]}; {ALIKE}"
    )


def late(ranks: Sequence[int], operation: str, deadline_s: float | None) -> DeadlineExceeded:
    """The error of ranks that have not come to an operation in time; which they are may be unknown."""
    numbers = ", ".join(map(str, ranks))
    who = f"ranks {numbers} have" if len(ranks) > 1 else f"rank {numbers} has" if ranks else "a peer has"
    return DeadlineExceeded(
        f"{who} not taken part in {operation} within {deadline_s} s; see what keeps them, or give a longer deadline; "
        f"{ALIKE}"
    )
