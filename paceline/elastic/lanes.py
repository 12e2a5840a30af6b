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


@final
@dataclass(frozen=True)
class Lanes:
    """A value: each event makes the next one. Whoever begins an epoch first has it dealt to all who are there, a lane
    each. What is left in the lane of one who has gone is given to those who ask, a batch at a time, when they have come
    to the end of their own.

    A batch that has been given is given to nobody else, so each counts once: with whoever has it, or, if that goes as
    well before it has done it, with the next one.
    """

    present: tuple[int, ...] = ()
    """Workers that take part."""
    dealt: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By epoch: whose its lanes are, or were."""
    rests: tuple[LaneBatch, ...] = ()
    """Of lanes whose workers have gone: the first batch that nobody has, if the lane has so many."""
    back: tuple[LaneBatch, ...] = ()
    """Given to those who have gone since, and not done."""
    given: Mapping[int, tuple[LaneBatch, ...]] = field(default_factory=dict)
    """By worker, in their order."""
    samples: int = 0
    """That those who have gone had trained on."""
    steps: int = 0

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
        }

    def begin(self, rank: int, *, epoch: int) -> tuple["Lanes", Lane | None]:
        """This worker comes to this epoch. Returns its lane; none if it was not there when the epoch was dealt."""
        ranks = self.dealt.get(epoch, self.present)
        lane = Lane(ranks.index(rank), len(ranks)) if rank in ranks else None
        return replace(self, dealt={**self.dealt, epoch: ranks}), lane

    def gone(self, rank: int, done: Done) -> "Lanes":
        """This worker does nothing more."""
        rests = list(self.rests)
        for epoch, ranks in self.dealt.items():
            number = done.own if epoch == done.epoch else 0
            is_through = epoch < done.epoch or (epoch == done.epoch and number == done.length)
            if rank in ranks and not is_through:
                rests.append(LaneBatch(epoch, number, ranks.index(rank), len(ranks)))
        return replace(
            self,
            present=tuple(other for other in self.present if other != rank),
            rests=tuple(rests),
            back=(*self.back, *self.given.get(rank, ())[done.left_over :]),
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
        after = [each for each in self.rests if (each.epoch, *each[2:]) != (batch.epoch, *batch[2:])]
        return replace(self, rests=tuple(after), given={**self.given, rank: self.given[rank][:-1]})

    def before(self, epoch: int) -> tuple[LaneBatch, ...]:
        """What is left of earlier epochs: single batches, and the first ones of rests."""
        return tuple(each for each in (*self.back, *self.rests) if each.epoch < epoch)


def _batches(plain: Sequence[Sequence[int]]) -> tuple[LaneBatch, ...]:
    return tuple(LaneBatch(*each) for each in plain)


def _without(batches: Sequence[LaneBatch], batch: LaneBatch) -> tuple[LaneBatch, ...]:
    return tuple(each for each in batches if each != batch)
