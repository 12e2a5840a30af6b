"""Sparse samples with labels from a planted model, of which few weights are not 0."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Samples(NamedTuple):
    """Each has as many features that are not 0. Where one comes twice, its values add up."""

    features: Tensor
    """int64 of shape (samples, features of one)."""
    values: Tensor
    """float64, of the same shape."""
    labels: Tensor
    """1 or -1, shape (samples,)."""

    def share(self, rank: int, size: int) -> "Samples":
        return Samples(*(each[rank::size] for each in self))

    def loss(self, weights: Tensor) -> float:
        """Mean logistic loss. Weights have shape (all features,)."""
        return float(F.softplus(-self.labels * self._scores(weights)).mean())

    def gradient(self, weights: Tensor) -> Tensor:
        """Of the sum of the samples' logistic losses, shape (all features,)."""
        slopes = -self.labels * torch.sigmoid(-self.labels * self._scores(weights))
        return self._spread(slopes.unsqueeze(1) * self.values, len(weights))

    def curvature(self, num_features: int) -> Tensor:
        """A bound on the same sum's curvature for each weight, whichever others move with it: a quarter of
        |X|^T |X| 1."""
        sizes = self.values.abs()
        return self._spread(sizes * sizes.sum(dim=1, keepdim=True) / 4, num_features)

    def _scores(self, weights: Tensor) -> Tensor:
        return (self.values * weights[self.features]).sum(dim=1)

    def _spread(self, terms: Tensor, num_features: int) -> Tensor:
        return terms.new_zeros(num_features).index_add_(0, self.features.reshape(-1), terms.reshape(-1))


def planted(num_samples: int, *, num_features: int, a_sample: int = 20, weighty: int = 50, seed: int = 0) -> Samples:
    """Features come up in proportion to 1 / (10 + k), and `weighty` of the ten times as many commonest matter."""
    generator = torch.Generator().manual_seed(seed)
    shares = 1 / torch.arange(10.0, 10 + num_features, dtype=torch.float64)
    features = torch.multinomial(shares, num_samples * a_sample, replacement=True, generator=generator)
    features = features.view(num_samples, a_sample)
    values = torch.randn(num_samples, a_sample, generator=generator, dtype=torch.float64)
    weights = torch.zeros(num_features, dtype=torch.float64)
    chosen = torch.randperm(min(10 * weighty, num_features), generator=generator)[:weighty]
    weights[chosen] = 3 * torch.randn(len(chosen), generator=generator, dtype=torch.float64)
    odds = torch.sigmoid((values * weights[features]).sum(dim=1))
    labels = 2.0 * (torch.rand(num_samples, generator=generator, dtype=torch.float64) < odds) - 1
    return Samples(features, values, labels.double())
