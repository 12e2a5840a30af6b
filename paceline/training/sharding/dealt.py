"""Map-style data of a run whose workers may die: dealt out round by round, to those who are there."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, final

from paceline.elastic import Cursor, GlobalBatch, Round
from paceline.membership import Membership
from paceline.training.sharding.division import Group, RankBatch
from paceline.training.sharding.orders import Orders
from paceline.training.sharding.part import Part, Place


@final
class Dealt:
    """A rank's part of a map-style `DataLoader`. While nobody dies it is that of `Orders`.

    Where an update has fewer samples left than there are workers, some get a sample that is another's, and counts
    nothing.
    """

    is_even = False

    def __init__(self, orders: Orders, *, rank: int, membership: Membership, global_batch: GlobalBatch) -> None:
        self._orders, self._rank, self._global_batch = orders, rank, global_batch
        self._membership = membership
        self._cursor = Cursor()
        self._round: Round | None = None

    def __len__(self) -> int:
        return len(self._orders)

    def identity(self) -> dict[str, Any]:
        return {**self._orders.identity(), "dealing": f"elastic, {self._global_batch}"}

    @property
    def under_way(self) -> Round | None:
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
        return self._cursor.is_update_complete(global_batch=self._global_batch)

    def resize(self, membership: Membership) -> None:
        """These are left: the round that is under way becomes theirs, and what others had of it is dealt anew."""
        lost = [place for place, rank in enumerate(self._membership.ranks) if rank not in membership.ranks]
        if self._round is not None:
            self._round = self._round.without(lost, global_batch=self._global_batch)
        self._membership = membership

    def parts(self, place: Place) -> Iterator[Part]:
        groups = list(self._orders.groups(place.epoch))
        self._cursor, self._round = Cursor(), None
        is_over = False
        while not is_over:
            is_over = True
            membership = self._membership
            ahead: deque[Round] = deque()
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

    def _dealing(self, groups: Sequence[Group], ahead: deque[Round]) -> Iterator[RankBatch]:
        """This rank's batches, as long as everybody lives."""
        cursor, size, place = self._cursor, self._membership.size, self._place
        while (dealt := cursor.deal(groups, size=size, global_batch=self._global_batch)) is not None:
            ahead.append(dealt)
            cursor = dealt.after
            yield RankBatch(dealt.parts[place] or next(filter(None, dealt.parts))[:1], dealt.weight(place))
