"""The pieces that know nothing of one another: topology, schedule, codec, correction, transform."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.aggregate import Contribution
from paceline.correction import Proximal, correct
from paceline.schedule import Every
from paceline.transform import ClipNorm, Transform, inward, outward

# --- schedule and codec ----------------------------------------------------------------------------------------------


@given(period=st.integers(1, 20), num_steps=st.integers(0, 100))
def test_a_period_is_due_once_in_it(period: int, num_steps: int) -> None:
    assert sum(bool(Every(period).due(step)) for step in range(1, num_steps + 1)) == num_steps // period


def test_a_period_is_at_least_one_step() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Every(0)


# --- correction and transform ----------------------------------------------------------------------------------------


def test_the_proximal_term_is_the_gradient_of_its_penalty() -> None:
    parameter, anchor = torch.tensor([1.0, -2.0], requires_grad=True), torch.tensor([0.5, 1.0])
    (0.3 / 2 * (parameter - anchor).square().sum()).backward()
    assert parameter.grad is not None
    expected, without = parameter.grad.clone(), torch.zeros(2, requires_grad=True)
    parameter.grad.zero_()
    correct(Proximal(0.3), [parameter, without], [anchor, anchor])
    torch.testing.assert_close(parameter.grad, expected)
    assert without.grad is None


@dataclass(frozen=True)
class Scale(Transform):
    factor: float

    def outward(self, contribution: Contribution) -> Contribution:
        return contribution._replace(tensors=[tensor * self.factor for tensor in contribution.tensors])

    def inward(self, joined: list[Tensor]) -> list[Tensor]:  # type: ignore[override]
        return [tensor / self.factor for tensor in joined]


def test_transforms_nest() -> None:
    """The innermost acts first on the way out, and last on the way in."""
    contribution = Contribution(0, 1.0, "gradient", [torch.tensor([3.0, 4.0])])
    layers = [ClipNorm(1.0), Scale(10.0)]
    sent = outward(layers, contribution)
    torch.testing.assert_close(sent.tensors[0], torch.tensor([6.0, 8.0]))
    torch.testing.assert_close(inward(layers, sent.tensors)[0], torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(contribution.tensors[0], torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_contribution_that_is_not_finite_is_left_to_those_who_refuse_it(poison: float) -> None:
    contribution = Contribution(0, 1.0, "delta", [torch.tensor([1.0]), torch.tensor([poison])])
    assert ClipNorm(1.0).outward(contribution) is contribution


def test_what_is_short_enough_leaves_as_it_is() -> None:
    contribution = Contribution(0, 1.0, "delta", [torch.tensor([0.6]), torch.tensor([0.8])])
    assert ClipNorm(1.01).outward(contribution) is contribution
