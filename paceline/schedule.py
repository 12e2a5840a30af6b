"""When a worker exchanges: which fragments of what it holds are due after a step."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
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


@final
@dataclass(frozen=True, kw_only=True)
class Rounds(Schedule):
    """Rounds of local steps, in each of which every fragment leaves a worker and is joined once.

    Fragment f of F is joined when (f + 1) / F of the round is over, and leaves `delay` steps before: workers compute
    these steps while it is under way (Douillard et al., "Streaming DiLoCo", 2025, sections 2.2 and 2.3).

    Raises:
        ValueError: a number is out of range, or a fragment would leave before the one before it is joined.

    >>> [step for step in range(1, 13) if Rounds(every=6, fragments=2, delay=1).leaving(step)]
    [2, 5, 8, 11]
    >>> [Rounds(every=6, fragments=2, delay=1).due(step) for step in (2, 3, 6)]
    [(), (0,), (1,)]
    """

    every: int
    """Local steps of a round."""
    fragments: int = 1
    delay: int = 0
    single: int = 0
    """Rounds of one step, which come first (post-local SGD: Lin et al., ICLR 2020, section 3)."""
    warmup: int = 0
    """Rounds that then grow evenly from one step to `every` (Lin et al., appendix B.4.2)."""

    def __post_init__(self) -> None:
        least = {"every": 1, "fragments": 1, "delay": 0, "single": 0, "warmup": 0}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ValueError(f"{name} must be at least {number}, not {getattr(self, name)}")
        if self.fragments > self.every:
            raise ValueError(
                f"fragments must be at most every, {self.every}, not {self.fragments}: one is due at a time"
            )
        if self.delay >= self.every // self.fragments:
            raise ValueError(
                f"delay must be below the {self.every // self.fragments} steps from one fragment to the next, "
                f"not {self.delay}"
            )

    def due(self, step: int) -> tuple[int, ...]:
        return self._at(step, self._ends)

    def leaving(self, step: int) -> tuple[int, ...]:
        """The fragments that leave this worker after this step, to be joined at once or later."""
        return self._at(step, self._begins)

    def num_rounds(self, step: int) -> int:
        """How many are over after this step."""
        number, within, length = self._round(step)
        return number + (within == length)

    def num_steps(self, num_rounds: int) -> int:
        """How many the first rounds have together."""
        growing = max(0, min(num_rounds - self.single, self.warmup))
        full = max(0, num_rounds - self.single - self.warmup)
        return min(num_rounds, self.single) + self._growing_ends[growing] + full * self.every

    def _at(self, step: int, places: Callable[[int], list[int]]) -> tuple[int, ...]:
        _, within, length = self._round(step)
        return tuple(fragment for fragment, place in enumerate(places(length)) if place == within)

    def _ends(self, length: int) -> list[int]:
        """The step of a round after which each fragment is joined."""
        return [-(-length * (fragment + 1) // self.fragments) for fragment in range(self.fragments)]

    def _begins(self, length: int) -> list[int]:
        """When each fragment of a round leaves. In a short round, none does before the one before it is joined."""
        ends = self._ends(length)
        return [min(end, max(end - self.delay, before + 1)) for before, end in zip([0, *ends], ends, strict=False)]

    def _round(self, step: int) -> tuple[int, int, int]:
        """How many rounds came before this step's, which of its steps this is, from 1 on, and how many it has."""
        if step <= self.single:
            return step - 1, 1, 1
        step -= self.single
        growing = bisect_left(self._growing_ends, step) - 1
        if growing < self.warmup:
            begin, end = self._growing_ends[max(0, growing) : max(0, growing) + 2]
            return self.single + growing, step - begin, end - begin
        number, before = divmod(step - self._growing_ends[-1] - 1, self.every)
        return self.single + self.warmup + number, before + 1, self.every

    @cached_property
    def _growing_ends(self) -> list[int]:
        """The steps of the first so many growing rounds together."""
        lengths = (1 + (self.every - 1) * number // self.warmup for number in range(self.warmup))
        return list(accumulate(lengths, initial=0))
