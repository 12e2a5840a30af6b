"""Map-style data of a run whose workers may die, and others come: dealt out round by round, to those who are there."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Protocol, final

from paceline.elastic import Cursor, Deal, GlobalBatch, resized
from paceline.membership import Membership
from paceline.training.sharding.division import Group, RankBatch
from paceline.training.sharding.orders import Orders
from paceline.training.sharding.part import Part, Place

AT_START = "workers at the start"
"""Their number, by which global batches are as large as they are, as an elastic run's checkpoint names it."""


class PassesOver(Protocol):
    """A loader that may be in an epoch that the run has behind it."""

    @property
    def place(self) -> Place: ...

    @property
    def passes_over(self) -> bool: ...


@final
class Dealt:
    """A rank's part of a map-style `DataLoader`. While nobody dies or comes it is that of `Orders`.

    Where an update has fewer samples left than there are workers, some get a sample that is another's, which counts
    nothing. So does a worker that joins, in the round that the others are at.

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
        self._past: tuple[Deal, ...] = ()  # done, but with weights that may be asked for yet
        self._num_done = 0
        self.num_done_of_pass = 0
        """As `num_done`, of this pass over the data."""
        self._complete = Cursor()  # where the last update was
        self._is_taken_up = False  # cursor and round are where the next pass begins
        self._behind: deque[Callable[[], object]] | None = None
        """Of one who joins: ends one after another the rounds that others have made since they gave it their state."""
        self._laid_out: tuple[int, list[Group]] | None = None

    def __len__(self) -> int:
        return len(self._orders)

    def identity(self) -> dict[str, Any]:
        dealing = {"dealing": f"elastic, {self._global_batch}", AT_START: self._orders.size}
        return {**self._orders.identity(), **dealing}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Whom it is dealt out to."""
        return self._membership.ranks

    @property
    def place(self) -> int:
        """This rank's, among them."""
        return self.ranks.index(self._rank)

    @property
    def num_done(self) -> int:
        """Batches that each worker has done."""
        return self._num_done

    @property
    def num_dealt(self) -> int:
        """Batches that each worker has been dealt up to now."""
        return self._num_done + len(self.under_way)

    def weight(self, first: int | None = None, stop: int | None = None) -> float:
        """This worker's of `weights`."""
        return self.weights(first, stop)[self.place]

    def weights(self, first: int | None = None, stop: int | None = None) -> tuple[float, ...]:
        """Each worker's mean weight in the batches from one number on, counted from 0, to before another; by default,
        in what is under way."""
        known = (*self._past, *self.under_way)
        begin = self.num_dealt - len(known)
        first, stop = self._num_done if first is None else first, self.num_dealt if stop is None else stop
        deals = known[max(0, first - begin) : max(0, stop - begin)]
        places = range(self._membership.size)
        return tuple(fmean(deal.weight(place) for deal in deals) if deals else 1.0 for place in places)

    def commit(self, *, asks_from: int | None = None) -> bool:
        """What is under way is done. Returns whether the update has all its samples.

        Args:
            asks_from: the first batch whose weight may be asked for yet; none: that of no batch before the next.
        """
        known = (*self._past, *self.under_way)
        self.num_done_of_pass += len(self.under_way)
        self._num_done = self.num_dealt
        num_kept = 0 if asks_from is None else min(len(known), self._num_done - asks_from)
        self._past = known[len(known) - num_kept :]
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
        change = partial(resized, lost=lost, num_joiners=len(joiners), global_batch=self._global_batch)
        self.under_way, self._past = change(self.under_way), change(self._past)
        self._membership = membership

    def go_on_with(self, ranks: Sequence[int]) -> None:
        """These have taken part in what is under way, and nobody else."""
        if tuple(ranks) != self.ranks:
            self.resize(Membership(self._membership.epoch + 1, tuple(ranks)))

    def lay_out_next(self, loader: PassesOver) -> None:
        """Lay out the pass that begins, in case this rank comes to take part in it: the others wait for it from then
        on, and to lay out a million samples takes half a second."""
        if self._orders.is_plain and not loader.passes_over:  # other samplers may draw each pass only once
            epoch = loader.place.epoch
            self._laid_out = epoch, list(self._orders.groups(epoch))

    def enter(self, behind: deque[Callable[[], object]]) -> None:
        """This rank takes part once all these rounds have been ended, in the one that others are then at, of which it
        has no samples."""
        self._behind = behind

    def state(self) -> dict[str, Any]:
        """Where the epoch is, as plain data."""
        under_way, past = ([deal.plain for deal in deals] for deals in (self.under_way, self._past))
        done = {"num_done": self._num_done, "num_done_of_pass": self.num_done_of_pass}
        return {"cursor": self._cursor.plain, "under_way": under_way, "past": past, **done}

    def state_for_later(self) -> dict[str, Any]:
        """As of the last update, since a run that goes on from a checkpoint has nothing of one that is under way."""
        return {"cursor": self._complete.plain, "under_way": []}

    def take_up(self, state: Mapping[str, Any], membership: Membership) -> None:
        """Go on from there, with what these have been dealt."""
        self._cursor = self._complete = Cursor.of_plain(state["cursor"])
        self.under_way = tuple(Deal.of_plain(deal) for deal in state.get("under_way", ()))
        self._past = tuple(map(Deal.of_plain, state.get("past", ())))
        self._num_done, self.num_done_of_pass = state.get("num_done", 0), state.get("num_done_of_pass", 0)
        self._membership, self._is_taken_up = membership, True

    def parts(self, place: Place) -> Iterator[Part]:
        groups = self._groups(place.epoch)
        if place.state is not None:
            self.take_up(place.state, self._membership)
            self.num_done_of_pass = place.num_batches_done
        if self._end_pass is not None and self.under_way and not self._is_taken_up and not self._end_pass():
            return  # the script has left the pass before, and the run ends with its round
        if not self._is_taken_up:  # of a run that was not elastic, what is done tells where it was
            self._cursor = self._complete = Cursor(place.num_batches_done)
            self.num_done_of_pass = place.num_batches_done
            if self._end_pass is None:
                self.under_way = ()
        if self._behind is not None and not self._catch_up(groups, self._behind):
            return
        cursor = self._cursor
        while True:
            membership = self._membership
            ahead: deque[Deal] = deque()
            path = [self._rank, place.epoch, *([membership.epoch] if membership.epoch > 1 else [])]
            for part in self._orders.fetched(self._dealing(groups, cursor, ahead), *path):
                dealt = ahead.popleft()
                self.under_way = (*(self.under_way if self._end_pass is not None else ()), dealt)
                num_samples = len(dealt.parts[self.place])
                yield part._replace(num_samples=num_samples, weight=dealt.weight(self.place))
                if self._membership is not membership:  # what was fetched ahead is others' now
                    break
            else:
                goes_on = self._end_pass is not None and self._end_pass()
                if not goes_on or self._membership is membership:
                    break
            cursor = self._reached
        if self._end_pass is None:
            self.under_way = ()

    def _groups(self, epoch: int) -> list[Group]:
        laid_out, self._laid_out = self._laid_out, None
        return laid_out[1] if laid_out is not None and laid_out[0] == epoch else list(self._orders.groups(epoch))

    @property
    def _reached(self) -> Cursor:
        """Where the cursor is when all that is under way is done."""
        return self.under_way[-1].after if self.under_way else self._cursor

    def _catch_up(self, groups: Sequence[Group], behind: deque[Callable[[], object]]) -> bool:
        """Returns whether the others are in this pass by now."""
        while True:
            if not self.under_way:
                dealt = self._cursor.deal(groups, size=self._membership.size, global_batch=self._global_batch)
                if dealt is None:
                    self._is_taken_up = False
                    return False
                self.under_way = (dealt,)
            if not behind:
                break
            behind.popleft()()
        self.go_on_with(sorted({*self.ranks, self._rank}))
        self._behind, self._is_taken_up = None, True
        return True

    def _dealing(self, groups: Sequence[Group], cursor: Cursor, ahead: deque[Deal]) -> Iterator[RankBatch]:
        """This rank's batches from there on, as long as everybody lives."""
        size, place = self._membership.size, self.place
        dealt = self.under_way[-1] if self._is_taken_up and self.under_way else None
        self._is_taken_up = False
        while True:
            dealt = dealt or cursor.deal(groups, size=size, global_batch=self._global_batch)
            if dealt is None:
                return
            ahead.append(dealt)
            yield RankBatch(dealt.parts[place] or dealt.stand_in, dealt.weight(place))
            cursor, dealt = dealt.after, None
