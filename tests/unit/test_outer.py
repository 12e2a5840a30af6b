"""Outer optimizers that go on with another one's state, or begin anew."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Store
from paceline.errors import UsageError
from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.outer import Adam, Average, FedAdagrad, FedAdam, FedYogi, Momentum, Nesterov, OfTorch, Outer
from paceline.server.state import export_state, import_state
from paceline.strategies.base import Context
from paceline.strategies.gossip.outer_step import OuterStep
from paceline.strategies.gossip.parcel import Parcel
from paceline.strategies.local_updates import LocalUpdates
from paceline.strategies.own_state import taken_up
from paceline.strategies.quorum import QuorumUpdates
from paceline.strategies.replica import describe
from paceline.topology import Ring

FAMILIES: list[list[Outer]] = [
    [Average()],
    [Momentum(), Nesterov()],
    [Adam(), OfTorch("AdamW", 0.1)],
    [FedAdam(), FedYogi(), FedAdagrad()],
    [OfTorch("RMSprop", 0.1)],
    [OfTorch("Adafactor", 0.1)],
]
"""Kinds that keep the same."""
KINDS = [kind for family in FAMILIES for kind in family]
SHAPES = [(), (3,), (3, 2)]


def stepped(
    outer: Outer, state: Mapping[str, Tensor], *, values: Sequence[Tensor] | None = None, num_steps: int = 1
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The values, ones at first, and the state after further steps."""
    parameters = [nn.Parameter(each.clone()) for each in values or [torch.ones(shape) for shape in SHAPES]]
    optimizer = outer.optimizer(parameters)
    import_state(optimizer, parameters, state)
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = parameter.detach() + 1
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in parameters)
    return [parameter.detach() for parameter in parameters], export_state(optimizer, parameters)


@pytest.mark.parametrize(("before", "after"), list(product(KINDS, repeat=2)), ids=str)
def test_an_outer_optimizer_goes_on_with_a_state_of_its_kind_alone(before: Outer, after: Outer) -> None:
    told: list[Mapping[str, Any]] = []
    values, left = stepped(before, {})
    saved = {f"outer.{name}": tensor for name, tensor in left.items()}
    state = taken_up(after, saved, tell=lambda _, fates: told.append(fates))
    found, _ = stepped(after, state, values=values)
    if before == after:
        undisturbed, _ = stepped(after, {}, num_steps=2)
        assert all(map(torch.equal, found, undisturbed))
    if any(before in family and after in family for family in FAMILIES):
        assert state.keys() == left.keys()
        assert told == []
    else:
        assert state == {}
        assert told == ([dict.fromkeys(saved, "reset")] if saved else [])


OTHERS = {"outer.0.exp_avg": torch.ones(3), "outer.0.exp_avg_sq": torch.ones(3), "outer.0.step": torch.tensor(1.0)}
"""What Adam has left."""


def test_noloco_tells_that_its_outer_optimizer_begins_anew() -> None:
    tell = Mock()
    own = Parcel(by_group([TensorSpec("x", (3,), torch.float32)]))
    step = OuterStep(Ring(), own, rank=0, size=2, outer=Nesterov(), tell=tell)
    step.load(OTHERS)
    tell.assert_called_once_with("carried_over", dict.fromkeys(OTHERS, "reset"))
    assert step.state().keys() == {"slow.0"}


def test_servers_of_a_quorum_begin_anew_with_another_outer_optimizer() -> None:
    tell, store = Mock(), Mock(allocate=lambda size: torch.zeros(size, dtype=torch.uint8))
    model = nn.Linear(3, 1, bias=False)
    context = Context(
        0, Membership.first(1), 0, 1, torch.device("cpu"), AloneCollective(), store=cast(Store, store), tell=tell
    )
    synchronizer = QuorumUpdates().bind(context, describe(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    synchronizer.restore({}, OTHERS, iteration=1)
    synchronizer.start()
    store.load_state.assert_called_once_with({}, iteration=1)
    tell.assert_called_once_with("carried_over", dict.fromkeys(OTHERS, "reset"))


OUT_OF_RANGE = [
    (OfTorch("SGD", 0.0), "outer=torch:kind=SGD:lr=0: lr is out of range; give a finite number above 0"),
    (Momentum(lr=math.nan), "lr is out of range"),
    (Nesterov(lr=math.inf), "lr is out of range"),
    (Momentum(momentum=2.0), "momentum is out of range; give from 0 to below 1"),
    (Nesterov(momentum=-0.1), "momentum is out of range"),
    (Nesterov(momentum=0.0), "momentum is out of range; give one above 0"),  # which torch refuses, in a worker
    (Adam(beta2=1.0), "beta2 is out of range"),
    (Adam(eps=0.0), "eps is out of range"),
    (FedYogi(tau=-1e-3), "tau is out of range"),
    (OfTorch("SDG", 0.1), "unknown optimizer of torch.optim 'SDG'; did you mean 'SGD'"),
    (OfTorch("LBFGS", 0.1), "unknown optimizer of torch.optim 'LBFGS'"),
]


@pytest.mark.parametrize(("outer", "message"), OUT_OF_RANGE, ids=lambda value: str(value)[:20])
def test_settings_that_train_nothing_or_to_no_end_are_refused(outer: Outer, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LocalUpdates(outer=outer)


@pytest.mark.parametrize("outer", KINDS, ids=str)
def test_settings_by_default_are_taken(outer: Outer) -> None:
    LocalUpdates(outer=outer)
