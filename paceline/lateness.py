"""Rounds that wait for nobody: how long simulated clients take is drawn, and late ones are left out, or count less."""

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, final

from paceline.roster import Sampler, num_drawn
from paceline.seeding import derive

_MEAN_OF_HALF_NORMAL = math.sqrt(2 / math.pi)


@final
@dataclass(frozen=True)
class First(Sampler, name="first"):
    """More clients begin a round than are to count; those do that are through first, before the deadline. What the
    others did is dropped (Bonawitz et al., "Towards federated learning at scale", MLSys 2019).

    Args:
        over: clients that begin, over those that are to count.
        deadline: in the mean client's times.
    """

    draws_times: ClassVar[bool] = True

    over: float = 1.3
    deadline: float = math.inf

    def __post_init__(self) -> None:
        if not 1 <= self.over < math.inf or not self.deadline > 0:
            raise ValueError("over must be at least 1 and finite, and deadline above 0")

    @property
    def ends_early(self) -> bool:
        return math.isfinite(self.deadline)

    def draw(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> list[int]:
        return [*_split(self, number, tuple(sizes), fraction, seed)[0]]

    def late(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> list[int]:
        return [*_split(self, number, tuple(sizes), fraction, seed)[1]]


@lru_cache(maxsize=8)
def _split(
    sampler: First, number: int, sizes: tuple[int, ...], fraction: float, seed: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Who counts in the round, and who is late. It is asked for several times a round."""
    draws, wanted = random.Random(derive(seed, "clients", number)), num_drawn(fraction, len(sizes))
    begun = draws.sample(range(len(sizes)), min(len(sizes), math.ceil(sampler.over * wanted)))
    times = {client: _duration(draws, sizes, client) for client in begun}
    in_time = sorted((client for client in begun if times[client] <= sampler.deadline), key=times.__getitem__)
    counted = tuple(in_time[:wanted])
    return counted, tuple(sorted({*begun} - {*counted}))


@final
@dataclass(frozen=True)
class Buffered(Sampler, name="buffered"):
    """Clients train all the time, and begin anew with the model of that moment; a round is over when so many changes
    have come as otherwise clients are drawn (FedBuff: Nguyen et al., AISTATS 2022, algorithm 1).

    Args:
        at_once: the part of the clients that train at the same time.
        exponent: a change whose turn began s rounds ago is multiplied by (1 + s) to the power of minus this.
    """

    draws_times: ClassVar[bool] = True
    overlaps: ClassVar[bool] = True

    at_once: float = 0.2
    exponent: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.at_once <= 1 or not 0 <= self.exponent < math.inf:
            raise ValueError("at_once must be above 0 and at most 1, and exponent at least 0 and finite")

    def require(self, *, num_clients: int, fraction: float) -> None:
        num_at_once, num_counted = num_drawn(self.at_once, num_clients), num_drawn(fraction, num_clients)
        if num_at_once + num_counted > num_clients + 1:
            raise ValueError(
                f"{num_at_once} clients that train at once and {num_counted} that a round is made of need as many less "
                f"one, and there are {num_clients}; lower at_once or fraction"
            )

    def draw(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> list[int]:
        return [*self.behind(number, sizes=sizes, fraction=fraction, seed=seed)]

    def behind(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> Mapping[int, int]:
        return self._rounds(sizes, fraction, seed).round(number).behind

    def oldest(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> int:
        return self._rounds(sizes, fraction, seed).round(number).oldest

    def factor(self, behind: int) -> float:
        return float((1 + behind) ** -self.exponent)

    def _rounds(self, sizes: Sequence[int], fraction: float, seed: int) -> "_Rounds":
        num_clients = len(sizes)
        return _rounds(tuple(sizes), num_drawn(self.at_once, num_clients), num_drawn(fraction, num_clients), seed)


class _Round(NamedTuple):
    behind: Mapping[int, int]
    """How many rounds ago each client's turn began, in the order in which they came."""
    oldest: int
    """The number of the round in which the first of those began who train when this one begins."""


@final
class _Rounds:
    """One run's, as far as anybody has asked. Nobody comes twice in a round, or trains twice at a time."""

    def __init__(self, sizes: tuple[int, ...], num_at_once: int, num_counted: int, seed: int) -> None:
        self._sizes, self._num_counted = sizes, num_counted
        self._draws = random.Random(derive(seed, "clients"))
        self._training: list[tuple[float, int, int]] = []  # when each is through, who, and since which round
        self._rounds: list[_Round] = []
        for client in self._draws.sample(range(len(sizes)), num_at_once):
            self._begin(client, now_s=0.0, number=0)

    def round(self, number: int) -> _Round:
        while len(self._rounds) <= number:
            self._rounds.append(self._fill(len(self._rounds)))
        return self._rounds[number]

    def _fill(self, number: int) -> _Round:
        behind, oldest = dict[int, int](), min(since for _, _, since in self._training)
        while len(behind) < self._num_counted:
            now_s, client, since = heapq.heappop(self._training)
            behind[client] = number - since
            is_over = len(behind) == self._num_counted
            busy = {other for _, other, _ in self._training} | (set() if is_over else behind.keys())
            while (other := self._draws.randrange(len(self._sizes))) in busy:
                pass
            self._begin(other, now_s=now_s, number=number + is_over)
        return _Round(behind, oldest)

    def _begin(self, client: int, *, now_s: float, number: int) -> None:
        heapq.heappush(self._training, (now_s + _duration(self._draws, self._sizes, client), client, number))


@lru_cache(maxsize=8)
def _rounds(sizes: tuple[int, ...], num_at_once: int, num_counted: int, seed: int) -> _Rounds:
    """One for all that ask for the same run."""
    return _Rounds(sizes, num_at_once, num_counted, seed)


def _duration(draws: random.Random, sizes: Sequence[int], client: int) -> float:
    """How long a client's turn takes, where the mean client's takes 1: in proportion to its samples, by a factor of a
    half-normal distribution (as Nguyen et al. draw it, section 5)."""
    return abs(draws.gauss(0.0, 1.0)) / _MEAN_OF_HALF_NORMAL * sizes[client] * len(sizes) / sum(sizes)
