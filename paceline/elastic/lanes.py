"""Who has which of an epoch's data where workers take their own steps, and what is left of those who have gone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, final


class Lane(NamedTuple):
    """A worker's part of an epoch: one of each global batch's parts."""

    lane: int
    size: int
    """Lanes that the epoch has."""


class LaneBatch(NamedTuple):
    """One batch of a lane."""

    epoch: int
    number: int
    lane: int
    size: int


class Done(NamedTuple):
    """How far a worker is, as its last push says that counts."""

    epoch: int = 0
    own: int = 0
    """Batches of its own lane, of this epoch."""
    length: int = -1
    """Of that lane; -1: nobody knows."""
    left_over: int = 0
    """Batches that others have left to it, of all epochs."""
    samples: int = 0
    """Of all these, and of the epochs before."""
    steps: int = 0


def further(one: Done, other: Done) -> Done:
    """Return the later one of two words about the same worker."""
    return max(one, other, key=lambda done: done.steps)


@final
@dataclass(frozen=True)
class Lanes:
    """A value: each event makes the next one. Whoever begins an epoch first has it dealt to all who are there, a lane
    each. What is left in the lane of one who has gone is given to those who ask, a batch at a time, when they have come
    to the end of their own. So is what workers give back of their lanes for one who comes, who has none of this epoch.

    A batch that has been given is given to nobody else, so each counts once: with whoever has it, or, if that goes as
    well before it has done it, with the next one.
    """

    present: tuple[int, ...] = ()
    """Workers that take part."""
    dealt: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By epoch: whose its lanes are, or were."""
    rests: tuple[LaneBatch, ...] = ()
    """Of lanes whose workers have gone, or given them back: the first batch that nobody has, if the lane has so
    many."""
    back: tuple[LaneBatch, ...] = ()
    """Given to those who have gone since, and not done."""
    given: Mapping[int, tuple[LaneBatch, ...]] = field(default_factory=dict)
    """By worker, in their order."""
    samples: int = 0
    """That those who have gone had trained on."""
    steps: int = 0
    ends: tuple[LaneBatch, ...] = ()
    """Of lanes whose workers have given back the rest: its first batch. Those before it are their own."""

    @classmethod
    def first(cls, num_workers: int) -> Self:
        return cls(tuple(range(num_workers)))

    @classmethod
    def resumed(cls, plain: Mapping[str, Any], everyone: Mapping[int, Done], *, num_workers: int) -> "Lanes":
        """A run goes on with so many workers, of whom none has what one had in the run before.

        Args:
            plain: of the run before.
            everyone: how far each of its workers was.
        """
        before = cls.of_plain(plain)
        for rank, done in everyone.items():
            before = before.gone(rank, done)
        return cls(tuple(range(num_workers)), dict.fromkeys(before.dealt, ()), before.rests, before.back)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Self:
        """What `plain` was given for."""
        return cls(
            tuple(plain["present"]),
            {int(epoch): tuple(ranks) for epoch, ranks in plain["dealt"].items()},
            _batches(plain["rests"]),
            _batches(plain["back"]),
            {int(rank): _batches(batches) for rank, batches in plain["given"].items()},
            plain["samples"],
            plain["steps"],
            _batches(plain.get("ends", ())),
        )

    @property
    def plain(self) -> dict[str, Any]:
        """For a file, or a message."""
        return {
            "present": list(self.present),
            "dealt": {str(epoch): list(ranks) for epoch, ranks in self.dealt.items()},
            "rests": [list(each) for each in self.rests],
            "back": [list(each) for each in self.back],
            "given": {str(rank): [list(each) for each in batches] for rank, batches in self.given.items()},
            "samples": self.samples,
            "steps": self.steps,
            "ends": [list(each) for each in self.ends],
        }

    def begin(self, rank: int, *, epoch: int) -> tuple["Lanes", Lane | None]:
        """This worker comes to this epoch. Returns its lane; none if it was not there when the epoch was dealt."""
        ranks = self.dealt.get(epoch, self.present)
        lane = Lane(ranks.index(rank), len(ranks)) if rank in ranks else None
        return replace(self, dealt={**self.dealt, epoch: ranks}), lane

    def come(self, rank: int) -> "Lanes":
        """This worker takes part from here on."""
        return replace(self, present=(*self.present, rank))

    def give_back(self, rank: int, rest: LaneBatch) -> "Lanes":
        """This worker does its lane up to this batch alone, and what is left of it with the others."""
        if rank not in self.present:  # it has died since, and all of its lane is given to others
            return self
        return replace(self, rests=(*self.rests, rest), ends=(*self.ends, rest))

    def gone(self, rank: int, done: Done) -> "Lanes":
        """This worker does nothing more. Nothing is done a second time."""
        if rank not in self.present:
            return self
        rests, back = list(self.rests), [*self.back, *self.given.get(rank, ())[done.left_over :]]
        for epoch, ranks in self.dealt.items():
            number = done.own if epoch == done.epoch else 0
            is_through = epoch < done.epoch or (epoch == done.epoch and number == done.length)
            if rank not in ranks or is_through:
                continue
            first = LaneBatch(epoch, number, ranks.index(rank), len(ranks))
            end = next((each for each in self.ends if _lane_of(each) == _lane_of(first)), None)
            if end is None:
                rests.append(first)
            else:
                back += [first._replace(number=each) for each in range(number, end.number)]
        return replace(
            self,
            present=tuple(other for other in self.present if other != rank),
            rests=tuple(rests),
            back=tuple(back),
            given={other: batches for other, batches in self.given.items() if other != rank},
            samples=self.samples + done.samples,
            steps=self.steps + done.steps,
        )

    def give(self, rank: int, *, epoch: int) -> tuple["Lanes", LaneBatch | None]:
        """This worker has done its own lane of this epoch. Returns what it is to do besides; none if nothing is left of
        this epoch or an earlier one."""
        batch = min((each for each in (*self.back, *self.rests) if each.epoch <= epoch), default=None)
        if batch is None:
            return self, None
        given = {**self.given, rank: (*self.given.get(rank, ()), batch)}
        if batch in self.back:
            return replace(self, given=given, back=_without(self.back, batch)), batch
        rest = batch._replace(number=batch.number + 1)
        return replace(self, given=given, rests=(*_without(self.rests, batch), rest)), batch

    def is_none(self, rank: int, batch: LaneBatch) -> "Lanes":
        """The lane has no such batch: this worker, which was given it last, has nothing to do for it."""
        after = [each for each in self.rests if _lane_of(each) != _lane_of(batch)]
        return replace(self, rests=tuple(after), given={**self.given, rank: self.given[rank][:-1]})

    def before(self, epoch: int) -> tuple[LaneBatch, ...]:
        """What is left of earlier epochs: single batches, and the first ones of rests."""
        return tuple(each for each in (*self.back, *self.rests) if each.epoch < epoch)


def _lane_of(batch: LaneBatch) -> tuple[int, int, int]:
    return batch.epoch, batch.lane, batch.size


def _batches(plain: Sequence[Sequence[int]]) -> tuple[LaneBatch, ...]:
    return tuple(LaneBatch(*each) for each in plain)


def _without(batches: Sequence[LaneBatch], batch: LaneBatch) -> tuple[LaneBatch, ...]:
    return tuple(each for each in batches if each != batch)
