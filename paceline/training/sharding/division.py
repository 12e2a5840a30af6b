"""Batches dealt out to ranks."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from paceline.errors import UsageError


class RankBatch(NamedTuple):
    """One rank's part of one global batch."""

    samples: tuple[Any, ...]
    """Indices of a data set, or samples of a stream."""
    weight: float
    """This rank's share of the global batch, times the number of ranks; 1 where all have equally many samples."""


Group = list[Sequence[Any]]


def share_out(
    batches: Iterable[Sequence[Any]], *, rank: int, size: int, drop_last: bool = False
) -> Iterator[RankBatch]:
    """Deal `batches` out in groups of `size`, rank r taking the r-th of each group.

    A last group that has too few batches, or a short one, is joined and divided evenly; with fewer samples than ranks
    it is joined to the group before it. So every rank has as many batches, and no rank an empty one. With `drop_last`
    such a group is dropped, as one process with the combined batch would drop it. One group is read ahead, so that
    `batches` may have no end.

    Raises:
        UsageError: there are fewer samples than ranks.
    """
    for group in groups_of(batches, size=size, drop_last=drop_last):
        yield part_of(group, rank)


def undivided(batches: Iterable[Sequence[Any]]) -> Iterator[RankBatch]:
    """What `share_out` deals one rank alone, without a call in Python."""
    whole = map(tuple, filter(len, batches))
    return map(tuple.__new__, itertools.repeat(RankBatch), zip(whole, itertools.repeat(1.0)))


def share_out_plain(
    batches: Sequence[Sequence[Any]], *, rank: int, size: int, drop_last: bool = False
) -> Iterator[RankBatch]:
    """What `share_out` does, of batches of which only the last one may be shorter: nothing is joined to the groups
    before the last two, which are dealt out without a call in Python."""
    end = max(0, len(batches) // size - 2) * size
    rest = share_out(batches[end:], rank=rank, size=size, drop_last=drop_last)
    return itertools.chain(undivided(batches[rank:end:size]), rest)


def groups_of(batches: Iterable[Sequence[Any]], *, size: int, drop_last: bool = False) -> Iterator[Group]:
    """The global batches that `share_out` deals out, in one part for each rank. Raises as it does."""
    held: Group | None = None
    for group in _grouped(batches, size):
        if held is None or _count(group) >= size:
            if held is not None:
                yield held
            held = group
        elif not drop_last:
            held = [[sample for batch in (*held, *group) for sample in batch]]
    if held is not None and (len(held) < size or len(held[-1]) < len(held[0])):
        held = None if drop_last else _evened(held, size)
    if held is not None:
        yield held


def _grouped(batches: Iterable[Sequence[Any]], size: int) -> Iterator[Group]:
    remaining = iter(batches)
    while group := list(itertools.islice(remaining, size)):
        yield group


def _count(group: Group) -> int:
    return sum(map(len, group))


def part_of(group: Group, rank: int) -> RankBatch:
    """One rank's part of a global batch."""
    return RankBatch(tuple(group[rank]), len(group[rank]) * len(group) / _count(group))


def _evened(group: Group, size: int) -> Group:
    """The group's samples, divided evenly."""
    samples = [sample for batch in group for sample in batch]
    if len(samples) < size:
        raise UsageError(f"{len(samples)} samples cannot be divided among {size} workers; use fewer workers")
    bounds = [len(samples) * part // size for part in range(size + 1)]
    return [samples[start:stop] for start, stop in itertools.pairwise(bounds)]
