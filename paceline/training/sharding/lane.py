"""Map-style data of a run whose servers outlive workers: each has a lane of an epoch, and then what others have left of
theirs."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

from paceline.elastic import Lane, LaneBatch
from paceline.strategies.regrouping import LaneKeeper
from paceline.training.sharding.dealt import AT_START
from paceline.training.sharding.division import Group, RankBatch, part_of
from paceline.training.sharding.orders import Orders
from paceline.training.sharding.part import Part, Place


class Reached(NamedTuple):
    """How far a rank is, in the state of a place."""

    own: int = 0
    """Batches of its own lane, of the place's epoch."""
    length: int = -1
    """Batches in that lane; -1: it is not known yet."""
    left_over: int = 0
    """Batches that others have left to it, of all epochs."""


@final
class LaneData:
    """A rank's part of a map-style `DataLoader`. While nobody comes or goes it is that of `Orders`."""

    is_even = False

    def __init__(self, orders: Orders, *, rank: int, keeper: LaneKeeper) -> None:
        self._orders, self._rank, self._keeper = orders, rank, keeper
        self._num_left_over = 0
        self._rest: LaneBatch | None = None  # of its own lane: the first batch that nobody has fetched
        self._groups: dict[tuple[int, int], list[Group]] = {}  # by epoch and lanes, of the last two

    def __len__(self) -> int:
        return len(self._orders)

    def identity(self) -> dict[str, Any]:
        return {**self._orders.identity(), "dealing": "elastic, by lanes", AT_START: self._orders.size}

    def reached(self, place: Place) -> Reached:
        """How far this rank is where the next batch comes from there."""
        return Reached(*place.state) if place.state else Reached(left_over=self._num_left_over)

    def give_back(self) -> None:
        """Leave to all what nobody has fetched of this rank's lane. What it has fetched ahead it trains on."""
        rest, self._rest = self._rest, None
        if rest is not None:
            self._keeper.give_back(self._rank, rest)

    def parts(self, place: Place) -> Iterator[Part]:
        """The parts from the epoch's beginning on: what others have done of it is not dealt any more."""
        epoch = place.epoch
        lane = self._keeper.begin(self._rank, epoch=epoch)
        groups = [] if lane is None else self._groups_of(epoch, lane.size)
        own = 0
        if lane is not None:
            for part in self._orders.fetched(self._own(groups, epoch, lane), self._rank, epoch):
                own += 1
                yield part._replace(state=list(Reached(own, len(groups), self._num_left_over)))
            self._rest = None
        # What loader workers have read ahead was asked for as long ago: more may have been left since.
        while (first := self._next(epoch)) is not None:
            for part in self._orders.fetched(self._from(first, epoch), self._rank, epoch, 1):
                self._num_left_over += 1
                yield part._replace(state=list(Reached(own, len(groups), self._num_left_over)))

    def _own(self, groups: Sequence[Group], epoch: int, lane: Lane) -> Iterator[RankBatch]:
        self._rest = LaneBatch(epoch, 0, *lane)
        for number, group in enumerate(groups, start=1):
            if self._rest is None:
                return
            self._rest = self._rest._replace(number=number)
            yield part_of(group, lane.lane)

    def _groups_of(self, epoch: int, size: int) -> list[Group]:
        """The last two are kept: what is left is drawn a batch at a time, of lanes as they were dealt then."""
        if (epoch, size) not in self._groups:
            last = dict([*self._groups.items()][-1:])
            self._groups = {**last, (epoch, size): list(self._orders.groups(epoch, size=size))}
        return self._groups[epoch, size]

    def _from(self, batch: RankBatch | None, epoch: int) -> Iterator[RankBatch]:
        while batch is not None:
            yield batch
            batch = self._next(epoch)

    def _next(self, epoch: int) -> RankBatch | None:
        none: LaneBatch | None = None
        while (batch := self._keeper.next_left_over(self._rank, epoch=epoch, none=none)) is not None:
            groups = self._groups_of(batch.epoch, batch.size)
            if batch.number < len(groups):
                return part_of(groups[batch.number], batch.lane)
            none = batch
        return None
