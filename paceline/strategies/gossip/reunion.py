"""What asynchronous workers say of themselves when they meet anew, and what all of them make of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, final

from paceline.elastic import Done, further
from paceline.strategies.gossip.allowance import dealt


@final
@dataclass(frozen=True, kw_only=True)
class Word:
    """One worker's word. Nothing is under way: it has all answers that the living owe it."""

    rank: int
    began_at: int
    """The iteration from which gradients are counted; -1: it joins, and does not know."""
    counts: Mapping[int, int]
    """By worker, also of those who have gone, the gradients that it has applied, as far as is known here."""
    done: Mapping[int, Done]
    """By worker but itself, how far its work is in this one's model."""
    computes: bool
    """It has a gradient that it is to apply."""
    trains: bool
    """It goes on with steps: it is not in a pause, nor at its end."""
    has_left: bool
    """It takes no further step."""
    dealt_until: int
    """The iteration until which gradients were shared out; 0: they were not, since all met last."""
    stop: bool
    """Some worker wants all to stop."""

    @property
    def plain(self) -> dict[str, Any]:
        """For a message."""
        return {**self.__dict__, "counts": {**self.counts}, "done": {rank: [*done] for rank, done in self.done.items()}}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Self:
        return cls(**{**plain, "done": {rank: Done(*done) for rank, done in plain["done"].items()}})


@final
class Agreed(NamedTuple):
    """The same on all who are there."""

    began_at: int
    counts: dict[int, int]
    """Of all workers that there have been."""
    gone: dict[int, Done]
    """How far the work of those who are gone is in the models of those who are there."""
    active: list[int]
    """Places of those who have not come to their end."""
    stop: bool
    dealt_until: int
    """0: nothing was shared out."""
    shares: dict[int, int]
    """By place, how many gradients each may apply until then, besides one that it has; of those who train."""

    @property
    def iteration(self) -> int:
        return self.began_at + sum(self.counts.values())


def agree(everyone: Sequence[Word]) -> Agreed:
    """What follows of the words of all who are there, in the order of their places.

    Gradients are shared out anew: what the dead still had is not lost to the others, and each has one for the gradient
    that it has computed.
    """
    counts: dict[int, int] = {}
    done: dict[int, Done] = {}
    for each in everyone:
        for rank, count in each.counts.items():
            counts[rank] = max(count, counts.get(rank, 0))
        for rank, theirs in each.done.items():
            done[rank] = further(done.get(rank, Done()), theirs)
    present = {each.rank for each in everyone}
    began_at, until = max(each.began_at for each in everyone), max(each.dealt_until for each in everyone)
    iteration = began_at + sum(counts.values())
    training = {place: each for place, each in enumerate(everyone) if each.trains}
    shares: list[int] = []
    if until and training:
        num_computed = sum(each.computes for each in training.values())
        speeds = [counts[each.rank] + 1 for each in training.values()]
        shares = dealt(max(0, until - iteration - num_computed), speeds)
    return Agreed(
        began_at,
        counts,
        {rank: done.get(rank, Done()) for rank in counts if rank not in present},
        [place for place, each in enumerate(everyone) if not each.has_left],
        any(each.stop for each in everyone),
        until if training else 0,
        dict(zip(training, shares, strict=True)) if shares else {},
    )
