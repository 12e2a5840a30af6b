"""With whom a worker exchanges: sparse mixing weights for every step, and what follows from them.

A subclass says from whom a worker takes what, with which weight. The rest is derived: to whom it sends, the matrix,
the spectral gap.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from paceline.pieces import Piece

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True)
class Topology(Piece, ABC):
    """Neighbours of every worker at every step."""

    @abstractmethod
    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        """The weights with which `rank` mixes what it has at this step: its own, and those of its neighbours."""

    def period(self, size: int) -> int:
        """Steps after which the neighbours repeat."""
        return 1

    @final
    def neighbours(self, step: int, rank: int, size: int) -> "Neighbours":
        """A worker's neighbours at this step, with weights. Raises ValueError if a source is no worker."""
        return _neighbours(self, step % self.period(size), rank, size)

    @final
    def matrix(self, step: int, size: int) -> Tensor:
        """The mixing matrix W of a step: float64, `size` x `size`, row i holding the weights of worker i."""
        weights = torch.zeros(size, size, dtype=torch.float64)
        for rank in range(size):
            for source, weight in self.sources(step % self.period(size), rank, size).items():
                weights[rank, source] = weight
        return weights

    @final
    def contraction(self, size: int) -> float:
        """The 2-norm of W - J over a period, J averaging all: by this the distance to the mean shrinks at least."""
        product = torch.eye(size, dtype=torch.float64)
        for step in range(self.period(size)):
            product = self.matrix(step, size) @ product
        return float(torch.linalg.matrix_norm(product - 1 / size, 2))

    @final
    def spectral_gap(self, size: int) -> float:
        """What a period takes off the distance to the mean: 1 is all of it, 0 nothing."""
        return 1 - self.contraction(size)


@final
@dataclass(frozen=True)
class Neighbours:
    """One worker's at one step."""

    own_weight: float
    receives_from: Mapping[int, float]
    """The weight of each sender."""
    sends_to: Mapping[int, float]
    """The weight with which each receiver mixes it in."""


@final
@dataclass(frozen=True)
class Everybody(Topology, name="everybody"):
    """All workers with equal weights: what all-reduce does."""

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        return dict.fromkeys(range(size), 1 / size)


@final
@dataclass(frozen=True)
class Ring(Topology, name="ring"):
    """The two workers beside this one, a third each (Lian et al., NeurIPS 2017, section 5).

    >>> round(Ring().contraction(8), 4)
    0.8047
    """

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        members = {rank, (rank - 1) % size, (rank + 1) % size}
        return dict.fromkeys(sorted(members), 1 / len(members))


@final
@dataclass(frozen=True)
class Graph(Topology):
    """Any undirected graph over the workers' ranks, with Metropolis-Hastings weights (Xiao & Boyd, 2004, section 3):
    1 / (1 + the larger of both degrees) for each neighbour, and the rest for the worker itself."""

    graph: "networkx.Graph[Any]" = field(hash=False)
    """Its nodes are the ranks, 0 to the number of workers less one."""

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        if self.graph.number_of_nodes() != size or rank not in self.graph:
            raise ValueError(f"the graph has the nodes {sorted(self.graph)}, the run has the workers 0 to {size - 1}")
        degree = self.graph.degree
        weights = {other: 1 / (1 + max(degree[rank], degree[other])) for other in self.graph[rank] if other != rank}
        return {rank: 1 - sum(weights.values()), **weights}


@lru_cache(maxsize=4096)
def _neighbours(topology: Topology, step: int, rank: int, size: int) -> Neighbours:
    sources = dict(topology.sources(step, rank, size))
    if not set(sources) <= set(range(size)):
        raise ValueError(f"worker {rank} has the sources {sorted(sources)} among {size} workers")
    everybody = {other: topology.sources(step, other, size) for other in range(size) if other != rank}
    sends_to = {other: theirs[rank] for other, theirs in everybody.items() if rank in theirs}
    own_weight = sources.pop(rank, 0.0)
    return Neighbours(own_weight, sources, sends_to)
