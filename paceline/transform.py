"""What guards an exchange: transforms around what a worker sends and gets. They nest."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.aggregate import Contribution


class Transform(ABC):
    """One layer around the exchange. What it does on the way out, it may undo on the way in."""

    @abstractmethod
    def outward(self, contribution: Contribution) -> Contribution:
        """What leaves in the contribution's place; its tensors are not changed."""

    def inward(self, joined: Sequence[Tensor]) -> Sequence[Tensor]:
        """What comes back, of what was joined from all contributions."""
        return joined


@final
@dataclass(frozen=True)
class ClipNorm(Transform):
    """Shrinks a contribution to this 2-norm over all its tensors, if it is longer.

    One that is not finite stays as it is, for those who refuse it."""

    largest: float

    def outward(self, contribution: Contribution) -> Contribution:
        norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in contribution.tensors))
        if norm <= self.largest or not math.isfinite(norm):
            return contribution
        return contribution._replace(tensors=[tensor * (self.largest / norm) for tensor in contribution.tensors])


@final
@dataclass(frozen=True)
class AddNoise(Transform):
    """Adds Gaussian noise of this standard deviation to every element: behind `ClipNorm`, differential privacy by the
    client itself (McMahan et al., ICLR 2018, with the noise at the clients)."""

    deviation: float
    generator: torch.Generator

    def outward(self, contribution: Contribution) -> Contribution:
        noises = [
            torch.randn(tensor.shape, dtype=tensor.dtype, generator=self.generator).to(tensor.device)
            for tensor in contribution.tensors
        ]
        noisy = [tensor + self.deviation * noise for tensor, noise in zip(contribution.tensors, noises, strict=True)]
        return contribution._replace(tensors=noisy)


def outward(transforms: Sequence[Transform], contribution: Contribution) -> Contribution:
    """Through all layers, the innermost first."""
    for transform in transforms:
        contribution = transform.outward(contribution)
    return contribution


def inward(transforms: Sequence[Transform], joined: Sequence[Tensor]) -> Sequence[Tensor]:
    """Back through all layers, the outermost first."""
    for transform in reversed(transforms):
        joined = transform.inward(joined)
    return joined
