"""What larger batches are worth: the gradient noise scale, and steps to a target that follow from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@dataclass(frozen=True)
class NoiseScale:
    """McCandlish et al., "An Empirical Model of Large-Batch Training", 2018."""

    samples: float
    """B_simple = tr(Sigma) / |G|^2 (equation 2.9): a batch of this size is halfway between wasting steps and samples.
    Infinite where the true gradient is lost in the noise."""

    def steps(self, batch: float, *, staleness: float = 0.0) -> float:
        """Steps to a target relative to those with an infinite batch: 1 + B_noise / B (equations 2.7 and 2.11), and
        1 + tau + B_noise / B with gradients that are tau updates late.

        Delay leaves the term alone that noise limits, and slows in proportion the one that curvature limits (Koloskova,
        Stich and Jaggi, "Sharper convergence guarantees for asynchronous SGD", NeurIPS 2022). Their bounds leave
        factors open. With the factor 1 that is assumed here, n updates by n workers that are n - 1 late get as far as
        one update with the mean of their n gradients.
        """
        return 1 + staleness + self.samples / batch


@final
class NoiseSums:
    """Estimates the scale from gradients of batches of one size at the same parameters (appendix A.1).

    The mean of all is the gradient of one large batch. With |G_small|^2 and |G_big|^2 of batches b and B:
    |G|^2 = (B |G_big|^2 - b |G_small|^2) / (B - b) and tr(Sigma) = (|G_small|^2 - |G_big|^2) / (1 / b - 1 / B), neither
    of them biased. Their ratio is, slightly; with few gradients and a small |G| it is an order of magnitude.
    """

    def __init__(self) -> None:
        self.count = 0
        self._squares = 0.0
        self._sum: Tensor | None = None

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Take in the gradient of one more batch, which has as many samples as the others."""
        flat = torch.cat([gradient.detach().reshape(-1).double() for gradient in gradients])
        self.count += 1
        self._squares += float(flat @ flat)
        self._sum = flat if self._sum is None else self._sum.add_(flat)

    def scale(self, *, batch: int) -> NoiseScale:
        """At least two batches, of so many samples each, must have been added."""
        assert self._sum is not None
        small, big = batch, batch * self.count
        square_small = self._squares / self.count
        square_big = float(self._sum @ self._sum) / self.count**2
        gradient = (big * square_big - small * square_small) / (big - small)
        noise = (square_small - square_big) / (1 / small - 1 / big)
        return NoiseScale(max(0.0, noise) / gradient if gradient > 0 else math.inf)


def steps_ratio(noise: NoiseScale, *, batch: float, base_batch: float, staleness: float = 0.0) -> float:
    """How many times the steps of a base batch another batch, with late gradients, needs to the same target."""
    if math.isinf(noise.samples):
        return base_batch / batch
    return noise.steps(batch, staleness=staleness) / noise.steps(base_batch)
