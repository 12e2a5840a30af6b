"""With whom a worker exchanges: sparse mixing weights for every step, and what follows from them.

A subclass says from whom a worker takes what, with which weight. The rest is derived: to whom it sends, the matrix,
the spectral gap.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, final

import torch
from torch import Tensor

from paceline.pieces import Piece

_SHADES = "·░▒▓█"
_NOTHING = 1e-9
"""What rounding may leave of a weight."""
_MOST_STEPS = 1024
"""Of a period that is looked at."""
_NUM_SQUARES = 30
"""After so many, 1 - 1e-9 has come below a half."""


@dataclass(frozen=True)
class Topology(Piece, ABC):
    """Neighbours of every worker at every step."""

    is_symmetric: ClassVar[bool] = False
    """Whether, by how it is made, a worker's weights sum to one, none is below 0 and its own above it, and links weigh
    the same both ways, for any number of workers and at any step. Then mixing keeps the mean, and takes all to it where
    links join all, and nobody looks."""

    @abstractmethod
    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        """The weights with which `rank` mixes what it has at this step: its own, and those of its neighbours."""

    def period(self, size: int) -> int:
        """Steps after which the neighbours repeat."""
        return 1

    @final
    def neighbours(self, step: int, rank: int, size: int) -> "Neighbours":
        """A worker's neighbours at this step, with weights. Raises ValueError if a source is no worker."""
        return _links(self, step % self.period(size), size)[rank]

    @final
    def matrix(self, step: int, size: int) -> Tensor:
        """The mixing matrix W of a step: float64, `size` x `size`, row i holding the weights of worker i."""
        weights = torch.zeros(size, size, dtype=torch.float64)
        for rank in range(size):
            for source, weight in self.sources(step % self.period(size), rank, size).items():
                weights[rank, source] = weight
        return weights

    @final
    def drawing(self, step: int, size: int) -> str:
        """The mixing matrix as text: a line for each worker that receives, darker where a sender counts more."""
        width = len(str(size - 1))
        columns = " ".join(f"{rank:>{width}}" for rank in range(size))
        rows = [
            " ".join(_SHADES[math.ceil(weight * (len(_SHADES) - 1))] * width for weight in row.clamp(0, 1).tolist())
            for row in self.matrix(step, size)
        ]
        return "\n".join([f"{'':>{width}} {columns}", *(f"{rank:>{width}} {row}" for rank, row in enumerate(rows))])

    @final
    def contraction(self, size: int) -> float:
        """The 2-norm of W - J over a period, J averaging all: by this the distance to the mean shrinks at least."""
        return float(torch.linalg.matrix_norm(self._product(size) - 1 / size, 2))

    @final
    def spectral_gap(self, size: int) -> float:
        """What a period takes off the distance to the mean: 1 is all of it, 0 nothing."""
        return 1 - self.contraction(size)

    @final
    def keeps_mean(self, size: int) -> bool:
        """Whether mixing keeps the mean of all workers: every row and column of each matrix sums to one."""
        return _keeps_mean(self, size)

    @final
    def comes_together(self, size: int) -> bool:
        """Whether mixing that keeps the mean and joins all takes all to it: models may swap places for ever, or run
        away. It does where a period's product has no eigenvalue of 1 or more beside that of the mean: where its powers
        fall to nothing. A period of more than 1024 steps is taken on trust."""
        period = self.period(size)
        if self.is_symmetric or period > _MOST_STEPS or (period == 1 and self._mixes(size)):
            return True
        apart = self._product(size) - 1 / size
        for _ in range(_NUM_SQUARES):
            if float(torch.linalg.matrix_norm(apart)) < 0.5:
                return True
            apart = apart @ apart
        return False

    def _mixes(self, size: int) -> bool:
        """Whether all links weigh more than nothing, and somebody keeps a part of its own: then no eigenvalue but that
        of the mean is as large as 1 (Perron and Frobenius), and nobody multiplies large matrices."""
        near = [self.neighbours(0, rank, size) for rank in range(size)]
        weigh = all(each.own_weight >= 0 and min(each.receives_from.values(), default=1) > 0 for each in near)
        return weigh and any(each.own_weight > _NOTHING for each in near)

    def _product(self, size: int) -> Tensor:
        """What a period of mixing does."""
        product = torch.eye(size, dtype=torch.float64)
        for step in range(self.period(size)):
            product = self.matrix(step, size) @ product
        return product

    @final
    def joins_all(self, size: int) -> bool:
        """Whether what any worker has reaches every other in the end."""
        return _joins_all(self, size)

    @final
    def num_sent(self, size: int) -> tuple[float, int]:
        """How many models a worker sends at a step: on the average of workers and steps, and at most."""
        sent = [
            len(self.neighbours(step, rank, size).sends_to) for step in range(self.period(size)) for rank in range(size)
        ]
        return sum(sent) / len(sent), max(sent)


@final
@dataclass(frozen=True)
class Neighbours:
    """One worker's at one step."""

    own_weight: float
    receives_from: Mapping[int, float]
    """The weight of each sender."""
    sends_to: Mapping[int, float]
    """The weight with which each receiver mixes it in."""


def _reached(links: Sequence[Set[int]]) -> set[int]:
    """Whoever can be reached from the first."""
    found, edge = {0}, [0]
    while edge:
        edge = [other for other in {other for node in edge for other in links[node]} if other not in found]
        found.update(edge)
    return found


@lru_cache(maxsize=512)
def _links(topology: Topology, step: int, size: int) -> Sequence[Neighbours]:
    """The links of all workers at once: to whom one sends, the others' sources say."""
    sources = [dict(topology.sources(step, rank, size)) for rank in range(size)]
    sends_to: list[dict[int, float]] = [{} for _ in range(size)]
    for rank, theirs in enumerate(sources):
        if not all(0 <= source < size for source in theirs):
            raise ValueError(f"worker {rank} has the sources {sorted(theirs)} among {size} workers")
        for source, weight in theirs.items():
            if source != rank:
                sends_to[source][rank] = weight
    return [Neighbours(theirs.pop(rank, 0.0), theirs, sends_to[rank]) for rank, theirs in enumerate(sources)]


@lru_cache(maxsize=512)
def _keeps_mean(topology: Topology, size: int) -> bool:
    if topology.is_symmetric:
        return True
    for step in range(topology.period(size)):
        columns = [0.0] * size
        for rank in range(size):
            sources = topology.sources(step, rank, size)
            if not math.isclose(sum(sources.values()), 1):
                return False
            for source, weight in sources.items():
                columns[source] += weight
        if not all(math.isclose(column, 1) for column in columns):
            return False
    return True


@lru_cache(maxsize=512)
def _joins_all(topology: Topology, size: int) -> bool:
    """Looks after 1, 2, 4, ... steps: links that change have joined all after a few, and may repeat after many."""
    heard: list[set[int]] = [set() for _ in range(size)]
    told: list[set[int]] = [set() for _ in range(size)]
    num_steps = topology.period(size)
    for step in range(num_steps):
        for rank in range(size):
            for source in topology.sources(step, rank, size):
                heard[rank].add(source)
                told[source].add(rank)
        is_looked_at = (step + 1) & step == 0 or step + 1 == num_steps
        if is_looked_at and len(_reached(heard)) == len(_reached(told)) == size:
            return True
    return False
