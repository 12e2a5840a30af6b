"""Whose turn it is: which clients take part in a round, and which worker plays each."""

import heapq
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypedDict, final

from paceline.membership import Membership
from paceline.partition import Partition, Replicated
from paceline.pieces import Piece
from paceline.seeding import derive

_ROUNDS_AHEAD = 20
"""In so many rounds a worker that plays at all comes to a turn."""


class Sampler(Piece, ABC):
    """Draws the clients of a round. Pure: the same for the same seed and round."""

    is_independent: ClassVar[bool] = False
    """Whether each client takes part for itself, with the same probability in each round."""
    repeats: ClassVar[bool] = False
    """Whether a client may be drawn several times for a round, in which it then counts as often."""
    draws_times: ClassVar[bool] = False
    """Whether it draws how long clients take: real ones take their time themselves."""
    overlaps: ClassVar[bool] = False
    """Whether clients of one round may have begun in earlier ones."""

    @abstractmethod
    def draw(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> list[int]:
        """Clients of the round of this number, from 0 on; one that comes twice counts twice.

        Args:
            sizes: each client's samples.
            fraction: of the clients that take part.
        """

    def late(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> list[int]:
        """Those that began the round as well, and are too late for it: nobody plays them."""
        return []

    def behind(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> Mapping[int, int]:
        """How many rounds ago the turns of some of the clients began; the others' begin with the round."""
        return {}

    def oldest(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> int:
        """The first round whose model a turn of this round, or of a later one, begins with."""
        return number

    def factor(self, behind: int) -> float:
        """What the change of a turn is multiplied by that began so many rounds ago."""
        return 1.0

    @property
    def ends_early(self) -> bool:
        """Whether a round may be over before as many clients as it asks for are through."""
        return False

    def require(self, *, num_clients: int, fraction: float) -> None:
        """Raises ValueError, which says why, where there are too few clients."""


@final
@dataclass(frozen=True)
class Uniform(Sampler, name="uniform"):
    """A fixed number, each client as likely, none twice (McMahan et al., AISTATS 2017, algorithm 1)."""

    def draw(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> list[int]:
        return _random(seed, number).sample(range(len(sizes)), num_drawn(fraction, len(sizes)))


@final
@dataclass(frozen=True)
class BySize(Sampler, name="by-size"):
    """A fixed number, drawn with replacement, as likely as a client has samples (Li et al., ICLR 2020, scheme I, which
    goes with `weights=equal`)."""

    repeats: ClassVar[bool] = True

    def draw(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> list[int]:
        return _random(seed, number).choices(range(len(sizes)), weights=sizes, k=num_drawn(fraction, len(sizes)))


@final
@dataclass(frozen=True)
class Poisson(Sampler, name="poisson"):
    """Each client for itself with the probability `fraction`: rounds differ in size, and some may be empty."""

    is_independent: ClassVar[bool] = True

    def draw(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> list[int]:
        draws = _random(seed, number)
        return [client for client in range(len(sizes)) if draws.random() < fraction]


@final
@dataclass(frozen=True)
class Cyclic(Sampler, name="cyclic"):
    """All clients once, in an order that is drawn anew, before any takes part again (Malinovsky et al., "Federated
    optimization algorithms with random reshuffling and gradient compression", 2022)."""

    def draw(self, number: int, *, sizes: Sequence[int], fraction: float, seed: int) -> list[int]:
        count = num_drawn(fraction, len(sizes))
        rounds = -(-len(sizes) // count)
        order = list(range(len(sizes)))
        _random(seed, number // rounds).shuffle(order)
        start = number % rounds * count
        return order[start : start + count]


def num_drawn(fraction: float, num_clients: int) -> int:
    """Clients of a round: at least one."""
    return max(1, round(fraction * num_clients))


class _Asked(TypedDict):
    """What samplers are told besides the round."""

    sizes: Sequence[int]
    fraction: float
    seed: int


class Turn(NamedTuple):
    """One client's part in one round."""

    round: int
    client: int
    num_samples: int
    num_batches: int
    """Batches in each pass over its samples."""
    times: int = 1
    """How often it was drawn."""
    behind: int = 0
    """How many rounds ago it began, with the model of that time."""


@final
@dataclass(frozen=True, kw_only=True)
class Participation:
    """Who takes part in a run, and with which data."""

    num_clients: int
    fraction: float
    partition: Partition
    sampler: Sampler
    epochs: int
    """Passes of a client over its samples in a turn."""
    is_settled: bool
    """A client is always played by the same worker, which keeps what belongs to it."""
    weighs: bool = True
    """Clients count by their samples."""
    least: int = 1
    """Fewer clients make no round."""
    is_played: bool = True
    """False: clients are elsewhere, and no turn is played here."""

    def kept_by_all(self) -> "Participation":
        """As where workers come and go: all of them have what each client keeps, so that any may play it."""
        return replace(self, is_settled=False)

    def at_server(self) -> "Participation":
        """As a server sees it whose clients are elsewhere."""
        return replace(self, is_played=False)

    def at_client(self) -> "Participation":
        """As such a client sees it: alone, with all the data that its script has."""
        return replace(self, num_clients=1, fraction=1.0, partition=Replicated(), sampler=Uniform())


@final
class Roster:
    """The turns that one worker plays.

    Args:
        sizes: each client's samples.
        num_batches: that each client's samples make.
        rank: the worker's.
        ranks: those of all workers who play.
    """

    def __init__(
        self,
        participation: Participation,
        *,
        sizes: Sequence[int],
        num_batches: Sequence[int],
        rank: int,
        ranks: Sequence[int],
        seed: int,
    ) -> None:
        self.participation = participation
        self._sizes, self._num_batches = tuple(sizes), tuple(num_batches)
        self._rank, self._ranks, self._seed = rank, tuple(ranks), seed
        self._first = 0  # the first round that is looked at
        self._starts = [0]  # of it and those after: how many turns of this worker come before each
        self._dealt: tuple[int, dict[int, int]] = (-1, {})  # the last round that was dealt anew, and who plays it
        self._epoch = 0
        self.of_round = lru_cache(maxsize=2)(self._of_round)
        """This worker's turns of the round of this number, in the order in which it plays them."""

    def turn(self, number: int) -> Turn:
        """This worker's turn of this number, from 0 on, over all rounds; the first that is known for an earlier one,
        which is over."""
        number = max(number, self._starts[0])
        while self._starts[-1] <= number:
            self._reach(self._first + len(self._starts))
        place = bisect_right(self._starts, number) - 1
        return self.of_round(self._first + place)[number - self._starts[place]]

    def batches_of(self, number: int) -> int:
        """Batches of this worker's turn of this number; those of the largest client where it may never come to one, as
        where a round has fewer clients than workers."""
        number, last = max(number, self._starts[0]), self._first + len(self._starts) - 1 + _ROUNDS_AHEAD
        while self._starts[-1] <= number and self._first + len(self._starts) - 1 < last:
            self._reach(self._first + len(self._starts))
        return self.turn(number).num_batches if number < self._starts[-1] else max(self._num_batches)

    def _reach(self, number: int) -> int:
        """How many turns of this worker come before the round of this number."""
        while self._first + len(self._starts) <= number:
            last = self._first + len(self._starts) - 1
            self._starts.append(self._starts[-1] + len(self.of_round(last)))
        return self._starts[number - self._first]

    def word(self, number: int) -> dict[str, Any]:
        """Who plays the round of this number, as plain data, and since which epoch of membership."""
        return {"epoch": self._epoch, "players": list(self.players(number).items())}

    def take_up(self, word: Mapping[str, Any], number: int, *, num_turns: int) -> None:
        """This worker comes to a round of this number that others play. `num_turns`: those before it, as it counts its
        own."""
        self._epoch = word["epoch"]
        self._begin(number, num_turns, dict(word["players"]))

    def begin_at(self, number: int, *, num_turns: int) -> None:
        """The run goes on with the round of this number, before which this worker counts so many turns."""
        self._begin(number, num_turns, self.players(number))

    def deal_anew(self, number: int, membership: Membership, words: Sequence[Mapping[str, Any]]) -> None:
        """These workers play from here on. Each keeps its turns of this round, in their order. All turns of those who
        are gone, played or not, are dealt among these and come after.

        Args:
            words: of all of these. Some may have missed how the round was dealt last.
        """
        start, players = self._reach(number), dict(max(words, key=lambda word: word["epoch"])["players"])
        self._ranks, self._epoch = membership.ranks, membership.epoch
        kept = {client: rank for client, rank in players.items() if rank in self._ranks}
        self._begin(number, start, {**kept, **self._balanced([client for client in players if client not in kept])})

    def _begin(self, number: int, num_turns: int, players: dict[int, int]) -> None:
        self._first, self._starts, self._dealt = number, [num_turns], (number, players)
        self.of_round.cache_clear()

    def drawn(self, number: int) -> Counter[int]:
        """How often each client of a round was drawn for it, whoever plays it."""
        return Counter(self.participation.sampler.draw(number, **self._asked))

    def late(self, number: int) -> list[int]:
        """Clients that began a round and do not count, since they are too late."""
        return sorted(self.participation.sampler.late(number, **self._asked)) if self.participation.is_played else []

    def oldest(self, number: int) -> int:
        """The first round whose model a turn of this round, or of a later one, begins with."""
        return self.participation.sampler.oldest(number, **self._asked) if self.participation.is_played else number

    @property
    def _asked(self) -> _Asked:
        return {"sizes": self._sizes, "fraction": self.participation.fraction, "seed": self._seed}

    def _of_round(self, number: int) -> tuple[Turn, ...]:
        if not self.participation.is_played:
            return ()
        drawn, behind = self.drawn(number), self.participation.sampler.behind(number, **self._asked)
        return tuple(
            Turn(number, client, self._sizes[client], self._num_batches[client], drawn[client], behind.get(client, 0))
            for client, rank in self.players(number).items()
            if rank == self._rank
        )

    def players(self, number: int) -> dict[int, int]:
        """The rank that plays each client of a round, in the order in which clients were drawn, or dealt anew."""
        if number == self._dealt[0]:
            return dict(self._dealt[1])
        drawn = self.drawn(number)
        return self._settled(drawn) if self.participation.is_settled else self._balanced(drawn)

    def _settled(self, clients: Collection[int]) -> dict[int, int]:
        return {client: self._ranks[client % len(self._ranks)] for client in clients}

    def _balanced(self, clients: Collection[int]) -> dict[int, int]:
        """The largest first, each to the worker that has least (Graham, 1969)."""
        workers, players = [(0, rank) for rank in self._ranks], dict.fromkeys(clients, 0)
        for client in sorted(clients, key=lambda client: -self._num_batches[client]):
            num_batches, players[client] = workers[0]
            heapq.heapreplace(workers, (num_batches + self._num_batches[client], players[client]))
        return players


def _random(seed: int, number: int) -> random.Random:
    return random.Random(derive(seed, "clients", number))
