"""Outer optimizers that go on with another one's state, or begin anew."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.outer import Adam, Average, FedAdagrad, FedAdam, FedYogi, Momentum, Nesterov, OfTorch, Outer
from paceline.server.state import export_state, import_state
from paceline.strategies.own_state import taken_up

KINDS = [Average(), Momentum(), Nesterov(), Adam(), FedAdam(), FedYogi(), FedAdagrad(), OfTorch("RMSprop", 0.1)]


def stepped(outer: Outer, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state after a further step."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = outer.optimizer([parameter])
    import_state(optimizer, [parameter], state)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert parameter.isfinite().all()
    return export_state(optimizer, [parameter])


@pytest.mark.parametrize(("before", "after"), product(KINDS, repeat=2), ids=str)
def test_an_outer_optimizer_goes_on_with_a_state_of_its_kind_alone(before: Outer, after: Outer) -> None:
    told: list[Mapping[str, Any]] = []
    saved = {f"outer.{name}": tensor for name, tensor in stepped(before, {}).items()}
    state = taken_up(after, saved, tell=lambda _, fates: told.append(fates))
    own = stepped(after, state)
    if own.keys() == {name.removeprefix("outer.") for name in saved}:
        assert len(state) == len(saved)
        assert told == []
    else:
        assert state == {}
        assert told == ([dict.fromkeys(saved, "reset")] if saved else [])
