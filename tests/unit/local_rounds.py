"""Rounds of local updates in tests: ranks without an engine, their models, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

from paceline.comm.base import Collective
from paceline.membership import Membership
from paceline.strategies.base import Context, Strategy, Synchronizer
from paceline.strategies.replica import describe
from tests.unit.virtual_world import VirtualWorld


def bound(strategy: Strategy, collective: Collective, model: nn.Module, optimizer: Optimizer) -> Synchronizer:
    size = collective.size
    context = Context(collective.rank, Membership.first(size), collective.rank, size, torch.device("cpu"), collective)
    return strategy.bind(context, describe(model, optimizer))


def run_alone(
    strategy: Strategy, size: int, script: Callable[[int, Synchronizer, nn.Module, Optimizer], Any], **settings: Any
) -> list[Any]:
    """`script(rank, synchronizer, model, optimizer)` on ranks that have a model each."""

    def work(collective: Collective) -> Any:
        torch.manual_seed(0)
        model, optimizer = settings["build"]()
        synchronizer = bound(strategy, collective, model, optimizer)
        return script(collective.rank, synchronizer, model, optimizer)

    return VirtualWorld(size).run(work)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def shared(synchronizer: Synchronizer) -> Tensor:
    """The outer parameters."""
    with synchronizer.global_model() as model:
        return flat(model)


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def problem(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(4, 10, generator=generator)
    return x, (x[:, 0] > 0).long()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def with_sgd() -> tuple[nn.Module, Optimizer]:
    model = network()
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def with_adam() -> tuple[nn.Module, Optimizer]:
    model = network()
    return model, Adam(model.parameters(), lr=0.01)


def train(
    rank: int, synchronizer: Synchronizer, model: nn.Module, optimizer: Optimizer, *, num_steps: int = 24
) -> Tensor:
    for step in range(num_steps):
        x, y = problem(rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        synchronizer.step(optimizer.step, pause_at=0)
    synchronizer.leave()
    return shared(synchronizer)


def shared_after(strategy: Strategy, *, size: int = 3, build: Any = with_sgd, script: Any = train) -> Tensor:
    first, *others = run_alone(strategy, size, script, build=build)
    assert all(torch.equal(first, other) for other in others)
    return first
