"""The launcher's book of lanes: what workers ask and say of their data, on real and on simulated hosts."""

from collections.abc import Iterable, Mapping
from typing import Any, final

from paceline.elastic.lanes import Done, Lane, LaneBatch, Lanes


@final
class LaneBook:
    """Keeps the `Lanes` of a run, and knows who has one to itself."""

    def __init__(self, num_workers: int) -> None:
        self._lanes = Lanes.first(num_workers)
        self._in_lane: set[int] = set()  # workers that have all of a lane to themselves
        self.epochs: dict[int, int] = {}
        """By worker, the epoch of its data that it has begun last."""

    def is_present(self, rank: int) -> bool:
        """Whether this worker takes part."""
        return rank in self._lanes.present

    @property
    def plain(self) -> dict[str, Any]:
        """All lanes, for a checkpoint."""
        return self._lanes.plain

    def resume(self, plain: Mapping[str, Any]) -> None:
        """Go on from there, which nobody has begun to do."""
        self._lanes = Lanes.of_plain(plain)

    def begin(self, rank: int, *, epoch: int) -> Lane | None:
        """This worker comes to this epoch, and gets its lane; none if it was not there when the epoch was dealt."""
        self.epochs[rank] = epoch
        self._lanes, lane = self._lanes.begin(rank, epoch=epoch)
        self._in_lane.discard(rank)
        if lane is not None:
            self._in_lane.add(rank)
        return lane

    def give_back(self, rank: int, rest: LaneBatch) -> None:
        """This worker does its lane up to this batch alone, and what is left of it with the others."""
        self._in_lane.discard(rank)
        self._lanes = self._lanes.give_back(rank, rest)

    def next_left_over(self, rank: int, *, epoch: int, none: LaneBatch | None) -> LaneBatch | None:
        """This worker has done its own lane of this epoch, and gets a batch that others have left; none: there is none.

        Args:
            none: the batch that it was given last, if its lane turned out not to have that.
        """
        self._in_lane.discard(rank)
        if none is not None:
            self._lanes = self._lanes.is_none(rank, none)
        self._lanes, batch = self._lanes.give(rank, epoch=epoch)
        return batch

    def have_given_back(self, ranks: Iterable[int]) -> bool:
        """Whether none of these has more of a lane to itself than it has begun."""
        return self._in_lane.isdisjoint(ranks)

    def come(self, rank: int) -> None:
        """This worker takes part from here on."""
        if not self.is_present(rank):
            self._lanes = self._lanes.come(rank)

    def gone(self, rank: int, done: Done) -> None:
        """This worker does nothing more. What it has done is not done again."""
        self._lanes = self._lanes.gone(rank, done)
        self._in_lane.discard(rank)

    def left_over(self, epochs: Iterable[int]) -> tuple[LaneBatch, ...]:
        """What nobody has done when all have come to the end of their scripts, in these epochs of their data."""
        return self._lanes.before(max(epochs, default=0))


def in_words(left: Iterable[LaneBatch]) -> str:
    """Tell a user what `LaneBook.left_over` gives."""
    return "nobody has trained on what workers that are gone have left: " + ", ".join(
        f"in epoch {each.epoch}, of lane {each.lane}, from batch {each.number} on" for each in left
    )
