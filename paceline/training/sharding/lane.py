"""Map-style data of a run whose servers outlive workers: each has a lane of an epoch, and then what those have left who
have gone."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, final

from paceline.elastic import LaneBatch
from paceline.strategies.regrouping import LaneKeeper
from paceline.training.sharding.dealt import AT_START
from paceline.training.sharding.division import RankBatch, part_of
from paceline.training.sharding.orders import Orders
from paceline.training.sharding.part import Part, Place


class Reached(NamedTuple):
    """How far a rank is, in the state of a place."""

    own: int = 0
    """Batches of its own lane, of the place's epoch."""
    length: int = -1
    """Of that lane; -1: it is not known yet."""
    left_over: int = 0
    """Batches that others have left to it, of all epochs."""


@final
class LaneData:
    """A rank's part of a map-style `DataLoader`. While nobody comes or goes it is that of `Orders`."""

    is_even = False

    def __init__(self, orders: Orders, *, rank: int, keeper: LaneKeeper) -> None:
        self._orders, self._rank, self._keeper = orders, rank, keeper
        self._num_left_over = 0

    def __len__(self) -> int:
        return len(self._orders)

    def identity(self) -> dict[str, Any]:
        return {**self._orders.identity(), "dealing": "elastic, by lanes", AT_START: self._orders.size}

    def reached(self, place: Place) -> Reached:
        """How far this rank is where the next batch comes from there."""
        return Reached(*place.state) if place.state else Reached(left_over=self._num_left_over)

    def parts(self, place: Place) -> Iterator[Part]:
        """From the epoch's beginning, since what others have done of it is not dealt any more."""
        epoch = place.epoch
        lane = self._keeper.begin(self._rank, epoch=epoch)
        groups = [] if lane is None else list(self._orders.groups(epoch, size=lane.size))
        own = 0
        if lane is not None:
            batches = (part_of(group, lane.lane) for group in groups)
            for part in self._orders.fetched(batches, self._rank, epoch):
                own += 1
                yield part._replace(state=list(Reached(own, len(groups), self._num_left_over)))
        # What loader workers have read ahead was asked for as long ago: more may have been left since.
        while (first := self._next(epoch)) is not None:
            for part in self._orders.fetched(self._from(first, epoch), self._rank, epoch, 1):
                self._num_left_over += 1
                yield part._replace(state=list(Reached(own, len(groups), self._num_left_over)))

    def _from(self, batch: RankBatch | None, epoch: int) -> Iterator[RankBatch]:
        while batch is not None:
            yield batch
            batch = self._next(epoch)

    def _next(self, epoch: int) -> RankBatch | None:
        none: LaneBatch | None = None
        while (batch := self._keeper.next_left_over(self._rank, epoch=epoch, none=none)) is not None:
            group = next(itertools.islice(self._orders.groups(batch.epoch, size=batch.size), batch.number, None), None)
            if group is not None:
                return part_of(group, batch.lane)
            none = batch
        return None
