"""Who takes part in a run."""

from dataclasses import dataclass
from typing import Self, final


@final
@dataclass(frozen=True)
class Membership:
    """The ranks that take part, in ascending order. Each change begins a new epoch, which every message names.
    Raises ValueError if there is nobody, a rank is negative, or ranks are not in ascending order."""

    epoch: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks or self.ranks[0] < 0 or list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"the ranks of a membership must ascend from 0 or more, not {self.ranks}")

    @classmethod
    def first(cls, size: int) -> Self:
        """Ranks 0 to `size`, with which a run begins."""
        return cls(epoch=1, ranks=tuple(range(size)))

    @property
    def size(self) -> int:
        return len(self.ranks)
