"""How much counts what a worker has changed in a fragment: as many samples as it has had since that left it last."""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.strategies.base import Recovery


class _Steps(NamedTuple):
    """The steps of a fragment since it left this worker last."""

    total: float = 0.0
    """The sum of their weights."""
    number: int = 0
    first: int = 0
    """Batches that each worker had been dealt before them, where workers come and go."""


@final
class RoundWeights:
    """One worker's, in the mean over all workers.

    Args:
        recovery: where workers come and go, knows what each of those who are there has had.
    """

    def __init__(self, num_fragments: int, recovery: Recovery | None) -> None:
        self._recovery = recovery
        self._since = [_Steps()] * num_fragments
        self._left: dict[int, tuple[_Steps, int]] = {}  # and the batch before which it left
        self._met_at = -1
        """Batches dealt when workers met anew: of earlier ones, weights were among others."""

    def step(self, weight: float) -> None:
        """This worker has made a step with that weight."""
        self._since = [_Steps(each.total + weight, each.number + 1, each.first) for each in self._since]

    def leave(self, fragment: int) -> None:
        """What this worker has changed in it up to now is to be exchanged."""
        now = self._num_dealt
        self._left[fragment], self._since[fragment] = (self._since[fragment], now), _Steps(first=now)

    def has_left(self, fragment: int) -> bool:
        """Whether its exchange is not over."""
        return fragment in self._left

    def of(self, fragment: int) -> float:
        """What this worker's change of a fragment that has left counts, times the number of workers."""
        steps, stop = self._left[fragment]
        if self._recovery is not None and steps.first <= self._met_at:
            return self._recovery.weight_of(steps.first, stop)
        return steps.total / steps.number

    def of_all(self, fragment: int) -> tuple[float, ...]:
        """As `of`, of each worker, where workers come and go; the same on all."""
        steps, stop = self._left[fragment]
        return () if self._recovery is None else self._recovery.weights_of(steps.first, stop)

    def join(self, fragment: int) -> None:
        """The fragment's exchange is over."""
        del self._left[fragment]

    @property
    def asks_from(self) -> int:
        """The first batch that may count in what is exchanged later, when an exchange is over: nothing is under way
        then, since each fragment is joined before another leaves (`Rounds`)."""
        return min(each.first for each in self._since)

    def regroup(self) -> None:
        """Others take part from here on, also in what is under way."""
        self._met_at = self._num_dealt

    def said(self) -> list[list[int]]:
        """What all workers have alike, for one who joins."""
        left = [[fragment, steps.first, stop] for fragment, (steps, stop) in self._left.items()]
        return [[each.first for each in self._since], *left]

    def take_up(self, said: Sequence[Sequence[int]]) -> None:
        """What another worker's `said` gave. This one takes part in what has left that one."""
        firsts, *left = said
        self._since = [_Steps(first=first) for first in firsts]
        self._left = {fragment: (_Steps(first=first), stop) for fragment, first, stop in left}

    def state(self) -> Tensor:
        return torch.tensor([[each.total, each.number] for each in self._since], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """What `state` gave, of as many fragments; of others nothing is taken up."""
        if len(state) == len(self._since):
            self._since = [_Steps(float(total), int(number)) for total, number in state]

    @property
    def _num_dealt(self) -> int:
        return 0 if self._recovery is None else self._recovery.num_dealt
