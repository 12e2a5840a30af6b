"""What all workers do at the same place of their script, and what is said where one is at another."""

from typing import Any

from paceline.comm.base import Collective, Store
from paceline.errors import UsageError
from paceline.strategies.context import Context


def gathered(collective: Collective, place: str, said: Any = None) -> list[Any]:
    """What every rank says here, in rank order. Collective call.

    Raises:
        UsageError: a rank is at another place; raised on every rank.
    """
    everyone = collective.all_gather_object([place, said])
    for rank, (other, _) in enumerate(everyone):
        if other != everyone[0][0]:
            raise UsageError(
                f"rank 0 is at {everyone[0][0]} and rank {rank} at {other}: every rank must use and step the same "
                "optimizers in the same order, whatever its own batch needs; decide from what worker.all_reduce has "
                "given all, or let each batch use all optimizers' parameters"
            )
    return [theirs for _, theirs in everyone]


def furthest(context: Context, store: Store, iteration: int) -> int:
    """The iteration that the servers are at, where the furthest that a worker knows of is this one: of workers that are
    gone contributions may have counted that nobody who is there has heard of. Collective call."""
    if context.reform is None:
        return iteration
    found: int = context.collective.broadcast_object(store.how_far() if context.is_first else 0)
    return max(iteration, found)
