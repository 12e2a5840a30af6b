"""When a worker exchanges: which fragments of what it holds are due after a step."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final


class Schedule(ABC):
    """Pure: the same answer on every worker for the same step."""

    @abstractmethod
    def due(self, step: int) -> tuple[int, ...]:
        """The fragments that are exchanged after this step, the first of which is 1."""


@final
@dataclass(frozen=True)
class Every(Schedule):
    """Everything, in one fragment, after every so many steps.

    >>> [step for step in range(1, 10) if Every(4).due(step)]
    [4, 8]
    """

    period: int = 1

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period must be at least 1, not {self.period}")

    def due(self, step: int) -> tuple[int, ...]:
        return (0,) if step % self.period == 0 else ()
