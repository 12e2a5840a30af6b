"""Map-style data of a run whose workers may die, and others come: dealt out round by round, to those who are there."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, final

from paceline.elastic import Cursor, Deal, GlobalBatch, resized
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

    Args:
        end_pass: ends the exchange that is to come when all of a pass are dealt out, and says whether the run goes on;
            given where an exchange is of several rounds. None: each round has its own.
    """

    is_even = False

    def __init__(
        self,
        orders: Orders,
        *,
        rank: int,
        membership: Membership,
        global_batch: GlobalBatch,
        end_pass: Callable[[], bool] | None = None,
    ) -> None:
        self._orders, self._rank, self._global_batch = orders, rank, global_batch
        self._membership, self._end_pass = membership, end_pass
        self._cursor = Cursor()
        self.under_way: tuple[Deal, ...] = ()
        """What all were given since the last exchange, which is not done before the next."""
        self._complete = Cursor()  # where the last update was
        self._is_taken_up = False  # cursor and round are where the next pass begins

    def __len__(self) -> int:
        return len(self._orders)

    def identity(self) -> dict[str, Any]:
        dealing = {"dealing": f"elastic, {self._global_batch}", AT_START: self._orders.size}
        return {**self._orders.identity(), **dealing}

    @property
    def weight(self) -> float:
        """This worker's, in what is under way."""
        return fmean(deal.weight(self._place) for deal in self.under_way) if self.under_way else 1.0

    def commit(self) -> bool:
        """What is under way is done. Returns whether the update has all its samples."""
        self._cursor, self.under_way = self._reached, ()
        is_complete = self._cursor.is_update_complete(global_batch=self._global_batch)
        if is_complete:
            self._complete = self._cursor
        return is_complete

    def resize(self, membership: Membership) -> None:
        """These go on: what is under way becomes theirs, and what others had of it is dealt anew."""
        before = self._membership.ranks
        lost = [place for place, rank in enumerate(before) if rank not in membership.ranks]
        joiners = set(membership.ranks) - set(before)
        self.under_way = resized(self.under_way, lost=lost, num_joiners=len(joiners), global_batch=self._global_batch)
        self._membership = membership

    def state(self) -> dict[str, Any]:
        """Where the epoch is, as plain data."""
        return {"cursor": self._cursor.plain, "under_way": [deal.plain for deal in self.under_way]}

    def state_for_later(self) -> dict[str, Any]:
        """As of the last update, since a run that goes on from a checkpoint has nothing of one that is under way."""
        return {"cursor": self._complete.plain, "under_way": []}

    def take_up(self, state: Mapping[str, Any], membership: Membership) -> None:
        """Go on from there, with what these have been dealt."""
        self._cursor = self._complete = Cursor.of_plain(state["cursor"])
        self.under_way = tuple(Deal.of_plain(deal) for deal in state.get("under_way", ()))
        self._membership, self._is_taken_up = membership, True

    def parts(self, place: Place) -> Iterator[Part]:
        groups = list(self._orders.groups(place.epoch))
        if place.state is not None:
            self.take_up(place.state, self._membership)
        if self._end_pass is not None and self.under_way and not self._is_taken_up and not self._end_pass():
            return  # the script has left the pass before, and the run ends with its round
        if not self._is_taken_up:  # of a run that was not elastic, what is done tells where it was
            self._cursor = self._complete = Cursor(place.num_batches_done)
            if self._end_pass is None:
                self.under_way = ()
        cursor = self._cursor
        while True:
            membership = self._membership
            ahead: deque[Deal] = deque()
            path = [self._rank, place.epoch, *([membership.epoch] if membership.epoch > 1 else [])]
            for part in self._orders.fetched(self._dealing(groups, cursor, ahead), *path):
                dealt = ahead.popleft()
                self.under_way = (*(self.under_way if self._end_pass is not None else ()), dealt)
                num_samples = len(dealt.parts[self._place])
                yield part._replace(num_samples=num_samples, weight=dealt.weight(self._place))
                if self._membership is not membership:  # what was fetched ahead is others' now
                    break
            else:
                goes_on = self._end_pass is not None and self._end_pass()
                if not goes_on or self._membership is membership:
                    break
            cursor = self._reached
        if self._end_pass is None:
            self.under_way = ()

    @property
    def _reached(self) -> Cursor:
        """Where the cursor is when all that is under way is done."""
        return self.under_way[-1].after if self.under_way else self._cursor

    @property
    def _place(self) -> int:
        return self._membership.ranks.index(self._rank)

    def _dealing(self, groups: Sequence[Group], cursor: Cursor, ahead: deque[Deal]) -> Iterator[RankBatch]:
        """This rank's batches from there on, as long as everybody lives."""
        size, place = self._membership.size, self._place
        dealt = self.under_way[-1] if self._is_taken_up and self.under_way else None
        self._is_taken_up = False
        while True:
            dealt = dealt or cursor.deal(groups, size=size, global_batch=self._global_batch)
            if dealt is None:
                return
            ahead.append(dealt)
            yield RankBatch(dealt.parts[place] or next(filter(None, dealt.parts))[:1], dealt.weight(place))
            cursor, dealt = dealt.after, None
