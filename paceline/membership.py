"""Who takes part in a run, at one time of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Membership:
    """The workers of one epoch. A death or a join makes the next one; messages carry the epoch they are of.

    >>> Membership(0, (0, 1, 2)).without(1)
    Membership(epoch=1, ranks=(0, 2))
    """

    epoch: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.epoch < 0:
            raise ValueError(f"epoch must be at least 0, not {self.epoch}")
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)) or self.ranks[0] < 0:
            raise ValueError(f"ranks must be ascending numbers from 0, at least one, not {self.ranks}")

    @classmethod
    def of_size(cls, size: int) -> Membership:
        """The first epoch of a run with so many workers."""
        return cls(0, tuple(range(size)))

    @property
    def size(self) -> int:
        return len(self.ranks)

    def without(self, rank: int) -> Membership:
        """The next epoch, in which this worker has gone."""
        if rank not in self.ranks:
            raise ValueError(f"worker {rank} is none of {self.ranks}")
        return Membership(self.epoch + 1, tuple(other for other in self.ranks if other != rank))

    def with_rank(self, rank: int) -> Membership:
        """The next epoch, which this worker has joined."""
        if rank in self.ranks:
            raise ValueError(f"worker {rank} takes part already")
        return Membership(self.epoch + 1, tuple(sorted((*self.ranks, rank))))
