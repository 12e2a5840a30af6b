"""Differential privacy: what noise costs, and how a clipping norm follows the norms that are clipped."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.pieces import Piece

ORDERS = (*(1 + step / 10 for step in range(1, 100)), *map(float, range(11, 64)), 128.0, 256.0, 512.0, 1024.0)
"""Renyi orders of which the best is taken."""
_POINTS_A_DEVIATION, _DEVIATIONS = 40, 15
_LEAST_ORDER = 1.01
"""Below it the conversion to epsilon is not accurate."""


@final
class Accountant:
    """Adds up what releases cost that see one record each with probability `sample_rate`, independently (Poisson
    sampling), and add Gaussian noise (Mironov, "Renyi differential privacy", CSF 2017, proposition 1).

    A neighbouring data set has one record more or less.

    >>> accountant = Accountant()
    >>> accountant.spend(noise_multiplier=1.1, sample_rate=0.004, steps=15_000)
    >>> round(accountant.epsilon(delta=1e-5), 3)
    2.503
    """

    def __init__(self) -> None:
        self._spent = torch.zeros(len(ORDERS), dtype=torch.float64)

    def spend(self, *, noise_multiplier: float, sample_rate: float, steps: int = 1) -> None:
        """
        Args:
            noise_multiplier: the noise's standard deviation over the norm that one record's part is clipped to.

        Raises:
            ValueError: a value is out of range.
        """
        if not noise_multiplier > 0 or not 0 < sample_rate <= 1 or steps < 0:
            raise ValueError("noise_multiplier must be above 0, sample_rate in 0 to 1, and steps at least 0")
        self._spent = self._spent + steps * renyi_divergences(noise_multiplier, sample_rate)

    def epsilon(self, *, delta: float) -> float:
        """The epsilon with which everything spent is (epsilon, delta)-private (Canonne, Kamath and Steinke, NeurIPS
        2020, proposition 12). Raises ValueError if delta is not between 0 and 1."""
        if not 0 < delta < 1:
            raise ValueError(f"delta must be between 0 and 1, not {delta}")
        if not self._spent.any():
            return 0.0
        orders = torch.tensor(ORDERS, dtype=torch.float64)
        converted = self._spent + torch.log1p(-1 / orders) - torch.log(delta * orders) / (orders - 1)
        return max(0.0, float(converted[orders > _LEAST_ORDER].min()))


@lru_cache(maxsize=64)
def renyi_divergences(noise_multiplier: float, sample_rate: float) -> Tensor:
    """What one release costs at each order (Mironov, Talwar and Zhang, "Renyi differential privacy of the sampled
    Gaussian mechanism", 2019, section 3.3), by quadrature: the integrand is smooth and falls as a Gaussian does, so
    that the trapezoidal rule is exact to rounding."""
    return torch.tensor([_divergence(order, noise_multiplier, sample_rate) for order in ORDERS], dtype=torch.float64)


class OnSum(NamedTuple):
    """A server's noise."""

    multiplier: float
    """The standard deviation of the noise on the sum of changes, over the clip."""
    count_deviation: float
    """The standard deviation of the noise on how many changes were within the clip, each counted as 1/2 or -1/2."""
    quantile: float | None
    """Which quantile of the norms the clip follows by that count; none: it stays."""


@dataclass(frozen=True)
class Privacy(Piece, ABC):
    """How a client's change is hidden: shortened to `clip`, and under Gaussian noise of `noise` times that."""

    noise: float = 1.0
    clip: float = 1.0
    delta: float = 1e-5
    epsilon: float | None = None
    """What a run may cost; it ends with the round before."""

    def __post_init__(self) -> None:
        if not self.noise > 0 or not self.clip > 0 or not 0 < self.delta < 1:
            raise ValueError("noise and clip must be above 0, and delta between 0 and 1")
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, not {self.epsilon}")

    @property
    def follows_norms(self) -> bool:
        """Whether the clip does, so that the server counts those within it."""
        return False

    def on_sum(self, *, num_expected: float) -> "OnSum | None":
        """What the server adds to the sum of a round in which it expects so many clients; none: each client adds noise
        to its own change."""
        return None

    @abstractmethod
    def spent(self, *, rounds: int, most_turns: int, sample_rate: float) -> float:
        """Epsilon of a client, at the piece's delta.

        Args:
            most_turns: of those that any client has had in these rounds.
            sample_rate: with which each client takes part in a round.
        """


@final
@dataclass(frozen=True)
class Central(Privacy, name="central"):
    """A server that is trusted adds noise to the sum of a round's changes and divides by how many clients it expects
    (McMahan et al., ICLR 2018, algorithm 1 with the estimator f_f). What it publishes tells little of any client.

    With `quantile`, `clip` is where clipping begins, and follows that quantile of the norms (Andrew et al., NeurIPS
    2021, algorithm 1): part of the noise is then on the count of those within it."""

    quantile: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise ValueError(f"quantile must be between 0 and 1, not {self.quantile}")

    @property
    def follows_norms(self) -> bool:
        return self.quantile is not None

    def on_sum(self, *, num_expected: float) -> OnSum:
        if self.quantile is None:
            return OnSum(self.noise, 0.0, None)
        # A twentieth of the clients, as in section 3.1; more in a small round, so that changes take a sixth more noise.
        deviation = max(num_expected / 20, self.noise)
        return OnSum((self.noise**-2 - (2 * deviation) ** -2) ** -0.5, deviation, self.quantile)

    def spent(self, *, rounds: int, most_turns: int, sample_rate: float) -> float:
        accountant = Accountant()
        accountant.spend(noise_multiplier=self.noise, sample_rate=sample_rate, steps=rounds)
        return accountant.epsilon(delta=self.delta)


@final
@dataclass(frozen=True)
class Local(Privacy, name="local"):
    """Each client adds noise to its own change, so that the server learns little of it either (Duchi et al., FOCS
    2013). Two changes of a client are at most twice `clip` apart, and every turn counts in full."""

    def spent(self, *, rounds: int, most_turns: int, sample_rate: float) -> float:
        accountant = Accountant()
        accountant.spend(noise_multiplier=self.noise / 2, sample_rate=1.0, steps=most_turns)
        return accountant.epsilon(delta=self.delta)


def adapted_clip(clip: float, share_within: float, *, target: float = 0.5, rate: float = 0.2) -> float:
    """The next round's clipping norm, of which `target` is the share of norms that should be within (Andrew et al.,
    NeurIPS 2021, algorithm 1).

    Args:
        share_within: of this round's norms, those that were at most `clip`; with noise, where it is to be private.
    """
    return clip * math.exp(-rate * (share_within - target))


def _divergence(order: float, sigma: float, rate: float) -> float:
    spacing = sigma / _POINTS_A_DEVIATION
    z = torch.arange(-_DEVIATIONS * sigma, order + _DEVIATIONS * sigma, spacing, dtype=torch.float64)
    log_ratio = (2 * z - 1) / (2 * sigma**2) + math.log(rate)
    if rate < 1:
        log_ratio = torch.logaddexp(torch.tensor(math.log1p(-rate), dtype=torch.float64), log_ratio)
    log_density = -(z**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    log_moment = torch.logsumexp(order * log_ratio + log_density, dim=0) + math.log(spacing)
    return max(0.0, float(log_moment)) / (order - 1)
