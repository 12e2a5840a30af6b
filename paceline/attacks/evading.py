"""Inputs that a trained model takes for something else, though they have hardly changed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.pieces import Piece


class Box(NamedTuple):
    """Where an attack may move inputs: pixels stay from `low` to `high`, and within `reach`; all of shape (C, 1, 1)."""

    low: Tensor
    high: Tensor
    reach: Tensor

    def around(self, inputs: Tensor, found: Tensor) -> Tensor:
        """Return the tensor nearest to `found` that the box allows around `inputs`."""
        near = torch.minimum(torch.maximum(found, inputs - self.reach), inputs + self.reach)
        return torch.minimum(torch.maximum(near, self.low), self.high)


@dataclass(frozen=True)
class Evasion(Piece, ABC):
    """Knows the model, and changes each pixel by at most `eps` of the whole range."""

    eps: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.eps <= 1:
            raise ValueError(f"eps must be above 0 and at most 1, not {self.eps}")

    @abstractmethod
    def evading(
        self, model: nn.Module, inputs: Tensor, labels: Tensor, box: Box, *, generator: torch.Generator
    ) -> Tensor:
        """Return what the attacker shows instead of the inputs, which are not changed."""


@final
@dataclass(frozen=True)
class Fgsm(Evasion, name="fgsm"):
    """One step along the gradient's sign (Goodfellow et al., ICLR 2015, section 4)."""

    def evading(
        self, model: nn.Module, inputs: Tensor, labels: Tensor, box: Box, *, generator: torch.Generator
    ) -> Tensor:
        return box.around(inputs, inputs + box.reach * _direction(model, inputs, labels))


@final
@dataclass(frozen=True)
class Pgd(Evasion, name="pgd"):
    """Many small steps, each back into the box, from a random place in it (Madry et al., ICLR 2018, section 2.1).

    A step is `step` of the reach."""

    steps: int = 40
    step: float = 1 / 30

    def evading(
        self, model: nn.Module, inputs: Tensor, labels: Tensor, box: Box, *, generator: torch.Generator
    ) -> Tensor:
        drawn = torch.rand(inputs.shape, generator=generator) * 2 - 1
        found = box.around(inputs, inputs + box.reach * drawn)
        for _ in range(self.steps):
            found = box.around(inputs, found + self.step * box.reach * _direction(model, found, labels))
        return found


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(inputs).argmax(dim=1) == labels).double().mean())


def _direction(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """The sign of the loss's gradient in the inputs."""
    here = inputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(here), labels, reduction="sum"), [here])
    return gradient.sign()
