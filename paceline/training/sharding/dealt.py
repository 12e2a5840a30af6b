"""Map-style data of a run whose workers may die, and others come: dealt out round by round, to those who are there."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from paceline.elastic import Cursor, Deal, GlobalBatch
from paceline.membership import Membership
from paceline.training.sharding.division import Group, RankBatch
from paceline.training.sharding.orders import Orders
from paceline.training.sharding.part import Part, Place

AT_START = "workers at the start"
"""Their number, by which global batches are as large as they are, as an elastic run's checkpoint names it."""


@final
class Dealt:
    """A rank's part of a map-style `DataLoader`. While nobody dies or comes it is that of `Orders`.

    Where an update has fewer samples left than there are workers, some get a sample that is another's, and counts
    nothing; so does a worker that joins, of the round that the others are at.
    """

    is_even = False

    def __init__(self, orders: Orders, *, rank: int, membership: Membership, global_batch: GlobalBatch) -> None:
        self._orders, self._rank, self._global_batch = orders, rank, global_batch
        self._membership = membership
        self._cursor = Cursor()
        self._round: Deal | None = None
        self._complete = Cursor()  # where the last update was
        self._is_taken_up = False  # cursor and round are where the next pass begins

    def __len__(self) -> int:
        return len(self._orders)

    def identity(self) -> dict[str, Any]:
        dealing = {"dealing": f"elastic, {self._global_batch}", AT_START: self._orders.size}
        return {**self._orders.identity(), **dealing}

    @property
    def under_way(self) -> Deal | None:
        """What all were given last, and is not done."""
        return self._round

    @property
    def weight(self) -> float:
        """This worker's, in the round that is under way."""
        return self._round.weight(self._place) if self._round is not None else 1.0

    def commit(self) -> bool:
        """The round is done. Returns whether the update has all its samples."""
        assert self._round is not None
        self._cursor, self._round = self._round.after, None
        is_complete = self._cursor.is_update_complete(global_batch=self._global_batch)
        if is_complete:
            self._complete = self._cursor
        return is_complete

    def resize(self, membership: Membership) -> None:
        """These go on: the round that is under way becomes theirs, and what others had of it is dealt anew."""
        before = self._membership.ranks
        lost = [place for place, rank in enumerate(before) if rank not in membership.ranks]
        if self._round is not None and lost:
            self._round = self._round.without(lost, global_batch=self._global_batch)
        if self._round is not None:
            self._round = self._round.joined(len(set(membership.ranks) - set(before)))
        self._membership = membership

    def state(self) -> dict[str, Any]:
        """Where the epoch is, as plain data."""
        return {"cursor": self._cursor.plain, "round": None if self._round is None else self._round.plain}

    def state_for_later(self) -> dict[str, Any]:
        """As of the last update, since a run that goes on from a checkpoint has nothing of one that is under way."""
        return {"cursor": self._complete.plain, "round": None}

    def take_up(self, state: Mapping[str, Any], membership: Membership) -> None:
        """Go on from there, with what these have been dealt."""
        self._cursor = self._complete = Cursor.of_plain(state["cursor"])
        dealt = state["round"]
        self._round = None if dealt is None else Deal.of_plain(dealt)
        self._membership, self._is_taken_up = membership, True

    def parts(self, place: Place) -> Iterator[Part]:
        groups = list(self._orders.groups(place.epoch))
        if place.state is not None:
            self.take_up(place.state, self._membership)
        if not self._is_taken_up:  # of a run that was not elastic, what is done tells where it was
            self._cursor = self._complete = Cursor(place.num_batches_done)
            self._round = None
        is_over = False
        while not is_over:
            is_over = True
            membership = self._membership
            ahead: deque[Deal] = deque()
            path = [self._rank, place.epoch, *([membership.epoch] if membership.epoch > 1 else [])]
            for part in self._orders.fetched(self._dealing(groups, ahead), *path):
                self._round = dealt = ahead.popleft()
                num_samples = len(dealt.parts[self._place])
                yield part._replace(num_samples=num_samples, weight=dealt.weight(self._place))
                if self._membership is not membership:  # what was fetched ahead is others' now
                    is_over = False
                    break
        self._round = None

    @property
    def _place(self) -> int:
        return self._membership.ranks.index(self._rank)

    def _dealing(self, groups: Sequence[Group], ahead: deque[Deal]) -> Iterator[RankBatch]:
        """This rank's batches, as long as everybody lives."""
        cursor, size, place = self._cursor, self._membership.size, self._place
        dealt = self._round if self._is_taken_up else None
        self._is_taken_up = False
        while True:
            dealt = dealt or cursor.deal(groups, size=size, global_batch=self._global_batch)
            if dealt is None:
                return
            ahead.append(dealt)
            yield RankBatch(dealt.parts[place] or next(filter(None, dealt.parts))[:1], dealt.weight(place))
            cursor, dealt = dealt.after, None
