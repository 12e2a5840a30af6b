"""The one cursor of an epoch's data: what is dealt to whom, what is done, and what has to be dealt anew.

Every member computes the same from the same events, so that nobody asks for samples.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from paceline.elastic.spec import GlobalBatch

Group = Sequence[Sequence[Any]]
"""The samples of a global batch, in one part for each of the workers that the run started with."""


@final
@dataclass(frozen=True)
class Deal:
    """What members train on between two exchanges. All have it alike."""

    parts: tuple[tuple[Any, ...], ...]
    """Each member's samples, in the order of their ranks; empty where there are fewer samples than members."""
    num_samples: int
    """Of the update that the round belongs to."""
    begins: bool
    """The update begins with this round."""
    after: "Cursor"
    """When all parts are done."""

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "Deal":
        """What `plain` was given for."""
        after = Cursor.of_plain(plain["after"])
        return cls(tuple(map(tuple, plain["parts"])), plain["num_samples"], plain["begins"], after)

    @property
    def plain(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @property
    def stand_in(self) -> tuple[Any, ...]:
        """A sample for a member that has none, with which it counts nothing. When all who had some are gone, it is one
        of those that are dealt anew."""
        return next(filter(None, (*self.parts, self.after.rest)))[:1]

    def weight(self, place: int) -> float:
        """This member's share of the update, times the number of members: so the mean over them adds up the shares."""
        return len(self.parts[place]) * len(self.parts) / self.num_samples

    @property
    def share(self) -> float:
        """The part of the update's samples that this round brings, of 1."""
        return sum(map(len, self.parts)) / self.num_samples

    def without(self, lost: Collection[int], *, global_batch: GlobalBatch) -> "Deal":
        """The round, repeated by those who are left. `lost`: places of the others, whose samples are dealt anew."""
        kept = tuple(part for place, part in enumerate(self.parts) if place not in lost)
        back = tuple(sample for place in sorted(lost) for sample in self.parts[place])
        num_samples = self.num_samples if global_batch == "keep" else max(1, sum(map(len, kept)))
        cursor = self.after
        return Deal(kept, num_samples, self.begins, Cursor(cursor.num_groups, (*back, *cursor.rest), is_uneven=True))

    def joined(self, num_joiners: int) -> "Deal":
        """The round, in which so many take part besides, after the others, who have their samples already."""
        return replace(self, parts=(*self.parts, *((),) * num_joiners))


def resized(
    deals: Sequence[Deal], *, lost: Collection[int], num_joiners: int, global_batch: GlobalBatch
) -> tuple[Deal, ...]:
    """Rounds of one exchange, which those who are left repeat with so many joiners. What the lost had of all of them
    is dealt anew after the last one."""
    if not deals:
        return ()
    *earlier, last = (deal.without(lost, global_batch=global_batch) if lost else deal for deal in deals)
    back = tuple(sample for deal in deals[:-1] for place in sorted(lost) for sample in deal.parts[place])
    if back:
        last = replace(last, after=replace(last.after, rest=(*back, *last.after.rest), is_uneven=True))
    return tuple(deal.joined(num_joiners) for deal in (*earlier, last))


@final
@dataclass(frozen=True)
class Cursor:
    """How far an epoch is. A value: `Deal.after` is the next one."""

    num_groups: int = 0
    """Global batches that are done, or begun."""
    rest: tuple[Any, ...] = ()
    """Samples of these that are to be dealt yet, the first ones first."""
    is_uneven: bool = False
    """Data have been dealt in other parts than the groups', since members came or went."""

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "Cursor":
        """What `plain` was given for."""
        return cls(plain["num_groups"], tuple(plain["rest"]), plain["is_uneven"])

    @property
    def plain(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    def deal(self, groups: Sequence[Group], *, size: int, global_batch: GlobalBatch) -> Deal | None:
        """The next round for so many members; none at the epoch's end."""
        return self._keep(groups, size) if global_batch == "keep" else self._grow(groups, size)

    def is_update_complete(self, *, global_batch: GlobalBatch) -> bool:
        """Whether the update that was dealt last has all its samples."""
        return global_batch == "grow" or not self.rest

    def _keep(self, groups: Sequence[Group], size: int) -> Deal | None:
        """Parts of one group, none larger than the group's own."""
        begins = not self.rest
        num_groups = self.num_groups + begins
        if num_groups > len(groups):
            return None
        group = groups[num_groups - 1]
        num_samples = sum(map(len, group))
        if begins and size == len(group):
            return Deal(_tuples(group), num_samples, begins, Cursor(num_groups))
        samples = tuple(itertools.chain.from_iterable(group)) if begins else self.rest
        num_rounds = -(-len(samples) // (size * max(map(len, group))))
        taken = -(-len(samples) // num_rounds)
        return Deal(_evened(samples[:taken], size), num_samples, begins, Cursor(num_groups, samples[taken:], True))

    def _grow(self, groups: Sequence[Group], size: int) -> Deal | None:
        """As many samples for each member as in the parts of the first group."""
        num_groups, samples = self.num_groups, self.rest
        if not samples and num_groups < len(groups) and size == len(groups[num_groups]) and not self.is_uneven:
            group = groups[num_groups]
            return Deal(_tuples(group), sum(map(len, group)), True, Cursor(num_groups + 1))
        wanted = size * max(map(len, groups[0])) if groups else 0
        while len(samples) < wanted + size and num_groups < len(groups):
            samples += tuple(itertools.chain.from_iterable(groups[num_groups]))
            num_groups += 1
        if not samples:
            return None
        # A rest with less than a sample for each joins the round before it, as where nobody dies.
        taken = wanted if len(samples) == wanted or len(samples) >= wanted + size else len(samples)
        after = Cursor(num_groups, samples[taken:], is_uneven=True)
        return Deal(_evened(samples[:taken], size), taken, True, after)


def _tuples(group: Group) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(part) for part in group)


def _evened(samples: tuple[Any, ...], size: int) -> tuple[tuple[Any, ...], ...]:
    bounds = [len(samples) * part // size for part in range(size + 1)]
    return tuple(samples[start:stop] for start, stop in itertools.pairwise(bounds))
