"""What is done to contributions before another aggregator joins them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.aggregate.base import Aggregator, ByGram, squared_distances
from paceline.aggregate.coordinates import MEAN, require_byzantine


@final
@dataclass(frozen=True)
class NearestNeighbours(ByGram, name="nearest"):
    """Each contribution becomes the mean of the n - f that are nearest to it, itself included (Allouah et al., AISTATS
    2023, algorithm 2)."""

    byzantine: int
    then: Aggregator = MEAN

    def require(self, num_contributions: int) -> None:
        require_byzantine(self.byzantine, num_contributions, least=self.byzantine + 1)
        self.then.require(num_contributions)

    def weights(self, gram: Tensor, senders: Sequence[int]) -> Tensor:
        num_nearest = len(gram) - self.byzantine
        nearest = squared_distances(gram).sort(dim=1, stable=True).indices[:, :num_nearest]
        return torch.zeros_like(gram).scatter_(1, nearest, 1 / num_nearest)


@final
@dataclass(frozen=True)
class NormClipping(ByGram, name="clip"):
    """Contributions longer than `norm`, over all tensors, are shortened to it (Sun et al., 2019, section 3)."""

    norm: float
    then: Aggregator = MEAN

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.norm > 0:
            raise ValueError(f"norm must be above 0, not {self.norm}")

    def require(self, num_contributions: int) -> None:
        self.then.require(num_contributions)

    def weights(self, gram: Tensor, senders: Sequence[int]) -> Tensor:
        return torch.diag((self.norm / gram.diagonal().sqrt()).clamp(max=1))
