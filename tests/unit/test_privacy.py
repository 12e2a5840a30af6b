"""The accountant against figures of dp-accounting 0.6.0, closed forms, and what transforms add."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.aggregate import Contribution
from paceline.privacy import ORDERS, Accountant, adapted_clip, renyi_divergences
from paceline.transform import AddNoise, ClipNorm, outward

FIGURES = [  # sample rate, noise multiplier, steps, delta, epsilon
    (0.004, 1.1, 15_000, 1e-5, 2.5028709),
    (0.01, 1.0, 1_000, 1e-5, 2.1013665),
    (0.1, 2.0, 500, 1e-6, 6.6792927),
    (0.5, 5.0, 200, 1e-5, 7.2317822),
    (1.0, 20.0, 100, 1e-5, 2.1657157),
    (0.02, 0.6, 50, 1e-5, 6.0455289),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "epsilon"), FIGURES)
def test_the_figures_of_dp_accounting_come_out(
    rate: float, noise: float, steps: int, delta: float, epsilon: float
) -> None:
    accountant = Accountant()
    for _ in range(2):
        accountant.spend(noise_multiplier=noise, sample_rate=rate, steps=steps // 2)
    # Where its series does not converge, dp-accounting leaves an order out, which can only make epsilon larger.
    assert accountant.epsilon(delta=delta) == pytest.approx(epsilon, abs=1e-3 if rate < 0.5 else 1e-2)


def test_without_sampling_a_release_is_the_gaussian_mechanism() -> None:
    expected = torch.tensor(ORDERS, dtype=torch.float64) / (2 * 3.0**2)
    torch.testing.assert_close(renyi_divergences(3.0, 1.0), expected, rtol=1e-9, atol=0)


def test_at_whole_orders_a_release_is_the_binomial_sum() -> None:
    """Mironov et al., 2019, section 3.3."""
    rate, sigma = 0.05, 0.8
    found = dict(zip(ORDERS, renyi_divergences(sigma, rate).tolist(), strict=True))
    for order in (2, 5, 12):
        terms = [
            math.comb(order, k) * (1 - rate) ** (order - k) * rate**k * math.exp((k * k - k) / (2 * sigma**2))
            for k in range(order + 1)
        ]
        assert found[order] == pytest.approx(math.log(sum(terms)) / (order - 1), rel=1e-9)


def test_nothing_spent_is_nothing_lost_and_values_have_a_range() -> None:
    accountant = Accountant()
    assert accountant.epsilon(delta=1e-5) == 0
    for noise, rate, steps in ((0.0, 0.1, 1), (1.0, 0.0, 1), (1.0, 1.1, 1), (1.0, 0.1, -1)):
        with pytest.raises(ValueError, match="noise_multiplier must be above 0"):
            accountant.spend(noise_multiplier=noise, sample_rate=rate, steps=steps)
    with pytest.raises(ValueError, match="delta must be between 0 and 1, not 1"):
        accountant.epsilon(delta=1)


def test_a_clipping_norm_follows_a_quantile() -> None:
    """Of norms 1 to 100, half are within 50."""
    clip = 1.0
    for _ in range(400):
        clip = adapted_clip(clip, sum(norm <= clip for norm in range(1, 101)) / 100)
    assert 49 <= clip <= 51


def test_noise_comes_after_clipping() -> None:
    own = Contribution(3, 1.0, "delta", [torch.full((40_000,), 5.0), torch.zeros(2)])
    noisy = outward((ClipNorm(2.0), AddNoise(0.5, torch.Generator().manual_seed(1))), own)
    signal = outward((ClipNorm(2.0),), own)
    noise = noisy.tensors[0] - signal.tensors[0]
    assert abs(float(noise.std()) - 0.5) < 0.01
    assert abs(float(noise.mean())) < 0.01
    assert float(noisy.tensors[1].abs().min()) > 0
    assert torch.equal(own.tensors[0], torch.full((40_000,), 5.0))
