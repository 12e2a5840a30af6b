"""Attacks around what a hostile worker sends: gradients, what its local steps changed, or its model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from paceline.attacks.base import SentAttack

Direction = Literal["std", "mean", "sign"]
_HALVINGS = 60
"""How often the interval that a factor is searched in is halved: to the last bits of a float64."""


@final
@dataclass(frozen=True, kw_only=True)
class SignFlip(SentAttack, name="sign-flip"):
    """Minus the honest mean (Li et al., AAAI 2019, with the mean instead of the worker's own)."""

    def sent(self, own: Tensor, honest: Tensor, *, size: int, generator: torch.Generator) -> Tensor:
        return -honest.mean(dim=0)


@final
@dataclass(frozen=True, kw_only=True)
class Gauss(SentAttack, name="gauss"):
    """Noise alone, of standard deviation `sigma` (Blanchard et al., NeurIPS 2017, section 6)."""

    least_known: ClassVar[int] = 0
    sigma: float = 1.0

    def sent(self, own: Tensor, honest: Tensor, *, size: int, generator: torch.Generator) -> Tensor:
        return torch.randn(own.shape, dtype=own.dtype, generator=generator).to(own.device) * self.sigma


@final
@dataclass(frozen=True, kw_only=True)
class Alie(SentAttack, name="alie"):
    """The honest mean plus `strength` standard deviations, by n - 1, of each coordinate: "A little is enough" (Baruch
    et al., NeurIPS 2019)."""

    least_known: ClassVar[int] = 2
    strength: float = 1.5

    def sent(self, own: Tensor, honest: Tensor, *, size: int, generator: torch.Generator) -> Tensor:
        return honest.mean(dim=0) + self.strength * honest.std(dim=0)


@final
@dataclass(frozen=True, kw_only=True)
class InnerProduct(SentAttack, name="ipm"):
    """Minus `strength` times the honest mean: inner product manipulation (Xie et al., UAI 2019)."""

    strength: float = 2.0

    def sent(self, own: Tensor, honest: Tensor, *, size: int, generator: torch.Generator) -> Tensor:
        return -self.strength * honest.mean(dim=0)


@final
@dataclass(frozen=True, kw_only=True)
class MinMax(SentAttack, name="min-max"):
    """The honest mean less as much of a direction as leaves it no further from any honest contribution than two of
    these are from each other (Shejwalkar and Houmansadr, NDSS 2021, equation 9)."""

    least_known: ClassVar[int] = 2
    direction: Direction = "std"

    def sent(self, own: Tensor, honest: Tensor, *, size: int, generator: torch.Generator) -> Tensor:
        most = torch.stack([_squares(each, honest) for each in honest]).max()
        return _furthest(honest, self.direction, lambda candidate: bool(_squares(candidate, honest).max() <= most))


@final
@dataclass(frozen=True, kw_only=True)
class MinSum(SentAttack, name="min-sum"):
    """The same, with the sum of squared distances to all honest contributions (Shejwalkar and Houmansadr, NDSS 2021,
    equation 10)."""

    least_known: ClassVar[int] = 2
    direction: Direction = "std"

    def sent(self, own: Tensor, honest: Tensor, *, size: int, generator: torch.Generator) -> Tensor:
        most = torch.stack([_squares(each, honest).sum() for each in honest]).max()
        return _furthest(honest, self.direction, lambda candidate: bool(_squares(candidate, honest).sum() <= most))


@final
@dataclass(frozen=True, kw_only=True)
class ModelReplacement(SentAttack, name="model-replacement"):
    """The worker's own, times `boost`: by default as many as send for each hostile one of these, so that the mean
    becomes what these want (Bagdasaryan et al., AISTATS 2020, equation 3). Goes with an attack on its data."""

    least_known: ClassVar[int] = 0
    boost: float | None = None

    def sent(self, own: Tensor, honest: Tensor, *, size: int, generator: torch.Generator) -> Tensor:
        return own * (size / self.workers if self.boost is None else self.boost)


def _squares(some: Tensor, others: Tensor) -> Tensor:
    squares: Tensor = (some - others).square().sum(dim=-1)
    return squares


def _furthest(honest: Tensor, direction: Direction, is_hidden: Callable[[Tensor], bool]) -> Tensor:
    """The honest mean less the largest multiple of the direction that is still hidden."""
    mean: Tensor = honest.mean(dim=0)
    steps: dict[Direction, Tensor] = {"std": honest.std(dim=0), "mean": mean / mean.norm(), "sign": mean.sign()}
    step = steps[direction]
    low, high = 0.0, 1.0
    while is_hidden(mean - high * step) and high < torch.finfo(torch.float32).max:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_hidden(mean - middle * step) else (low, middle)
    return mean - low * step
