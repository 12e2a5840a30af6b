"""Topologies whose neighbours are the same at every step."""

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import final

from paceline.topology.base import Topology


def metropolis_hastings(rank: int, near: Set[int], degrees: Mapping[int, int]) -> dict[int, float]:
    """The weights with which `rank` mixes itself and those near it, which are symmetric and sum to one.

    1 / (1 + the larger of both degrees) for each neighbour, and the rest for itself (Xiao and Boyd, "Fast linear
    iterations for distributed averaging", Systems & Control Letters 53, 2004, section 4.2).
    """
    weights = {other: 1 / (1 + max(degrees[rank], degrees[other])) for other in sorted(near)}
    return {rank: 1 - sum(weights.values()), **weights}


@dataclass(frozen=True)
class Undirected(Topology):
    """Neighbours exchange both ways, with Metropolis-Hastings weights."""

    @abstractmethod
    def near(self, rank: int, size: int) -> Collection[int]:
        """The neighbours of a worker, in any order and number; itself does not count."""

    @final
    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        mine = set(self.near(rank, size)) - {rank}
        degrees = {other: len(set(self.near(other, size)) - {other}) for other in (rank, *mine)}
        return metropolis_hastings(rank, mine, degrees)


@final
@dataclass(frozen=True)
class Everybody(Topology, name="everybody"):
    """All workers with equal weights: what all-reduce does."""

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        return dict.fromkeys(range(size), 1 / size)


@final
@dataclass(frozen=True)
class Ring(Undirected, name="ring"):
    """The two workers beside this one, a third each (Lian et al., NeurIPS 2017, section 5).

    >>> round(Ring().contraction(8), 4)
    0.8047
    """

    def near(self, rank: int, size: int) -> Collection[int]:
        return (rank - 1) % size, (rank + 1) % size


@final
@dataclass(frozen=True)
class Chain(Undirected, name="chain"):
    """A ring without the link from the last worker to the first: a tree."""

    def near(self, rank: int, size: int) -> Collection[int]:
        return range(max(0, rank - 1), min(size, rank + 2))


@final
@dataclass(frozen=True)
class Torus(Undirected, name="torus"):
    """Rows and columns that each close to a ring; two links between the same workers count as one."""

    rows: int | None = None
    """None: the divisor of the number of workers that is nearest to its root, from below."""

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows must be at least 1, not {self.rows}")

    def near(self, rank: int, size: int) -> Collection[int]:
        rows = self.rows or next(count for count in range(math.isqrt(size), 0, -1) if size % count == 0)
        if size % rows:
            raise ValueError(f"{size} workers make no torus of {rows} rows; without rows= it takes any number")
        columns = size // rows
        row, column = divmod(rank, columns)
        beside = {row * columns + (column + hop) % columns for hop in (-1, 1)}
        return beside | {(row + hop) % rows * columns + column for hop in (-1, 1)}


@final
@dataclass(frozen=True)
class Star(Undirected, name="star"):
    """Everybody with worker 0: a tree."""

    def near(self, rank: int, size: int) -> Collection[int]:
        return range(size) if rank == 0 else (0,)


@final
@dataclass(frozen=True)
class Tree(Undirected, name="tree"):
    """A worker with its parent and its children; worker 0 is the root, and levels are filled from the left."""

    branching: int = 2
    """Children of a worker."""

    def __post_init__(self) -> None:
        if self.branching < 1:
            raise ValueError(f"branching must be at least 1, not {self.branching}")

    def near(self, rank: int, size: int) -> Collection[int]:
        first = rank * self.branching + 1
        parent = [(rank - 1) // self.branching] if rank else []
        return [*parent, *range(min(first, size), min(first + self.branching, size))]


@final
@dataclass(frozen=True)
class Hypercube(Undirected, name="hypercube"):
    """The workers whose number differs in one binary digit; for powers of two."""

    def near(self, rank: int, size: int) -> Collection[int]:
        if size & (size - 1):
            raise ValueError(f"a hypercube has a power of two of workers, not {size}; exponential takes any number")
        return [rank ^ 1 << bit for bit in range(size.bit_length() - 1)]


@final
@dataclass(frozen=True)
class Exponential(Topology, name="exponential"):
    """To the workers 1, 2, 4, ... places on, with equal weights (Ying et al., NeurIPS 2021, section 3).

    >>> round(Exponential().contraction(32), 4)
    0.6667
    """

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        num_hops = (size - 1).bit_length()
        members = [rank, *((rank - 2**hop) % size for hop in range(num_hops))]
        return dict.fromkeys(members, 1 / len(members))
