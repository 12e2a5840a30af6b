"""Aggregators that choose or weigh contributions by how far they lie from one another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.aggregate.base import Aggregator, ByGram, distances_from, squared_distances
from paceline.aggregate.coordinates import MEAN, AroundMedian, require_byzantine

_MOST_ITERATIONS = 1000
_CONVERGED = 1e-12


@final
@dataclass(frozen=True)
class Krum(ByGram, name="krum"):
    """The contribution that is nearest to its n - f - 2 nearest others (Blanchard et al., NeurIPS 2017, section 4)."""

    byzantine: int
    then = MEAN

    def require(self, num_contributions: int) -> None:
        require_byzantine(self.byzantine, num_contributions, least=self.byzantine + 3)

    def weights(self, gram: Tensor, senders: Sequence[int]) -> Tensor:
        return _of_best(squared_distances(gram), self.byzantine, num_chosen=1)


@final
@dataclass(frozen=True)
class MultiKrum(ByGram, name="multi-krum"):
    """The mean of the contributions that Krum ranks first: `chosen` of them, by default all but `byzantine` (Blanchard
    et al., NeurIPS 2017, section 4)."""

    byzantine: int
    chosen: int | None = None
    then: Aggregator = MEAN

    def require(self, num_contributions: int) -> None:
        require_byzantine(self.byzantine, num_contributions, least=self.byzantine + 3)
        if self.chosen is not None and not 1 <= self.chosen <= num_contributions:
            raise ValueError(f"chosen must be 1 to {num_contributions}, not {self.chosen}")
        self.then.require(self.chosen or num_contributions - self.byzantine)

    def weights(self, gram: Tensor, senders: Sequence[int]) -> Tensor:
        num_chosen = self.chosen or len(senders) - self.byzantine
        return _of_best(squared_distances(gram), self.byzantine, num_chosen=num_chosen)


@final
@dataclass(frozen=True)
class Bulyan(ByGram, name="bulyan"):
    """Krum chooses n - 2f contributions one after the other, each from those that are left; of their values in each
    coordinate, the n - 4f nearest to the median are averaged (El Mhamdi et al., ICML 2018, section 4)."""

    byzantine: int

    @property
    def then(self) -> Aggregator:  # type: ignore[override]  # nobody sets it
        return AroundMedian(2 * self.byzantine)

    def require(self, num_contributions: int) -> None:
        require_byzantine(self.byzantine, num_contributions, least=4 * self.byzantine + 3)

    def weights(self, gram: Tensor, senders: Sequence[int]) -> Tensor:
        distances, left, chosen = squared_distances(gram), list(range(len(gram))), []
        while len(left) > 2 * self.byzantine:
            best = int(_scores(distances[left][:, left], self.byzantine).argmin())
            chosen.append(left.pop(best))
        return torch.eye(len(gram), dtype=gram.dtype)[sorted(chosen)]


@final
@dataclass(frozen=True)
class GeometricMedian(ByGram, name="geometric-median"):
    """The point with the least sum of distances to all contributions (RFA: Pillutla et al., IEEE TSP 2022, algorithm
    2: the smoothed Weiszfeld algorithm), up to rounding. A distance counts as `nu` at least."""

    nu: float = 0.1
    then = MEAN

    def __post_init__(self) -> None:
        if not self.nu > 0:
            raise ValueError(f"nu must be above 0, not {self.nu}")

    def weights(self, gram: Tensor, senders: Sequence[int]) -> Tensor:
        mixture = gram.diagonal().isfinite().double()
        mixture /= mixture.sum().clamp(min=1)
        for _ in range(_MOST_ITERATIONS):
            before, mixture = mixture, 1 / distances_from(gram, mixture).clamp(min=self.nu)
            mixture = mixture / mixture.sum().clamp(min=torch.finfo(mixture.dtype).tiny)
            if float((mixture - before).abs().max()) < _CONVERGED:
                break
        return mixture[None]


@final
@dataclass(frozen=True)
class CenteredClipping(ByGram, name="centered-clipping"):
    """From 0, `iterations` times the mean of what leads to each contribution, at most `radius` of it (Karimireddy et
    al., ICML 2021, section 4, without the momentum of workers)."""

    radius: float
    iterations: int = 1
    then = MEAN

    def __post_init__(self) -> None:
        if not self.radius > 0 or self.iterations < 1:
            raise ValueError("radius must be above 0, and iterations at least 1")

    def weights(self, gram: Tensor, senders: Sequence[int]) -> Tensor:
        mixture = torch.zeros(len(gram), dtype=gram.dtype)
        for _ in range(self.iterations):
            factors = (self.radius / distances_from(gram, mixture)).clamp(max=1)
            mixture = mixture * (1 - factors.mean()) + factors / len(gram)
        return mixture[None]


def _of_best(distances: Tensor, byzantine: int, *, num_chosen: int) -> Tensor:
    chosen = _scores(distances, byzantine).argsort(stable=True)[:num_chosen].sort().values
    return torch.eye(len(distances), dtype=distances.dtype)[chosen]


def _scores(distances: Tensor, byzantine: int) -> Tensor:
    """For each contribution, the sum of its n - f - 2 smallest squared distances to others, or of one distance at
    least."""
    num_neighbours = max(1, len(distances) - byzantine - 2)
    others = distances.clone().fill_diagonal_(torch.inf)
    return others.sort(dim=1).values[:, :num_neighbours].sum(dim=1)
