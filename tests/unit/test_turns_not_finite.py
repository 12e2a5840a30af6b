"""A client's turn with a gradient that is not finite, where small gradients alone are looked at in every step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from paceline.comm.alone import AloneCollective
from paceline.config import RunConfig
from paceline.errors import NonFiniteGradient
from paceline.membership import Membership
from paceline.records import NullReporter
from paceline.strategies import build
from paceline.strategies.base import Context
from paceline.training.given import told_apart
from paceline.training.session import Session

NUM_STEPS = 4


class Turn:
    """One client's, of four steps; the gradient of a parameter is not finite in one of them."""

    def __init__(self, *, name: str, number: int, nonfinite: str = "raise", private: str = "") -> None:
        context = Context(0, Membership.first(1), 0, 1, torch.device("cpu"), AloneCollective(), None)
        options = {"clients": 1, "fraction": 1.0, "nonfinite": nonfinite, "private": private}
        self.session = Session(context, build("fed-avg", options), RunConfig(seed=0, max_steps=1), NullReporter())
        self.model = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 100), nn.Linear(100, 1))
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(NUM_STEPS * 2, 100, generator=generator))
        optimizer, loader = SGD(self.model.parameters(), lr=0.01), DataLoader(data, 2)
        given = told_apart((self.model, optimizer, loader), {})
        self.optimizer, [self.loader] = optimizer, self.session.prepare(given).values()
        self.name, self.number, self.num_steps = name, number, 0

    def play(self) -> None:
        try:
            for (x,) in self.loader:
                self.optimizer.zero_grad()
                self.model(x).square().mean().backward()
                if self.num_steps == self.number:
                    self.model.get_parameter(self.name).grad[0] = torch.inf
                self.optimizer.step()
                self.num_steps += 1
        finally:
            self.session.release()


@pytest.mark.parametrize("private", ["", "1"])
@pytest.mark.parametrize(
    ("name", "number", "steps"),
    [
        pytest.param("2.bias", 1, 1, id="small, in that step"),
        pytest.param("1.weight", 1, 2, id="large, in the next one"),
        pytest.param("1.weight", NUM_STEPS - 1, NUM_STEPS, id="large, at the end of the turn"),
    ],
)
def test_the_parameter_is_named(name: str, number: int, steps: int, private: str) -> None:
    turn = Turn(name=name, number=number, private=private)
    with pytest.raises(NonFiniteGradient, match=f"the gradient of parameter {name!r} on rank 0 is not finite"):
        turn.play()
    assert turn.num_steps == steps, "steps that the client took"


def test_a_step_that_is_to_be_left_out_is_looked_at_whole() -> None:
    turn = Turn(name="1.weight", number=1, nonfinite="skip")
    turn.play()
    assert all(parameter.isfinite().all() for parameter in turn.model.parameters())
    assert turn.num_steps == NUM_STEPS
