"""Whole scripts that nobody's tutorial has, for the rows of `test_odd_models`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.conformance.odd_models import loss_of
from tests.conformance.scripts import loader_of, momentum, perceptron, plain_step, samples


def training(worker: Any, model: nn.Module, *, count: int = 43) -> tuple[Any, Optimizer, DataLoader[Any]]:
    prepared: tuple[Any, Optimizer, DataLoader[Any]] = worker.prepare(
        model, momentum(model.parameters()), loader_of(samples(count))
    )
    return prepared


def with_hooks(worker: Any, *, when: str, kind: str) -> nn.Module:
    """The script halves every gradient in a hook of its own."""

    def halve(value: Tensor) -> Tensor | None:
        if kind == "gradient":
            return value * 0.5
        assert value.grad is not None
        value.grad.mul_(0.5)
        return None

    def add_hooks() -> None:
        for parameter in model.parameters():
            add = parameter.register_hook if kind == "gradient" else parameter.register_post_accumulate_grad_hook
            add(halve)  # type: ignore[arg-type]

    model = perceptron()
    if when == "before":
        add_hooks()
    model, optimizer, loader = training(worker, model)
    if when == "after":
        add_hooks()
    for batch in loader:
        plain_step(model, optimizer, batch)
    return model


def with_copies(worker: Any) -> nn.Module:
    """Copies the model after every step, and computes gradients of the copy."""
    model, optimizer, loader = training(worker, perceptron())
    for batch in loader:
        plain_step(model, optimizer, batch)
        best = copy.deepcopy(model)
        loss_of(best, batch).backward()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), best.parameters(), strict=True))
    return model


def by_hand(worker: Any) -> nn.Module:
    """Never calls the optimizer."""
    model, _, loader = training(worker, perceptron())
    for batch in loader:
        loss_of(model, batch).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
                parameter.grad = None
    return model


def accumulating_by_hand(worker: Any, *, count: int) -> nn.Module:
    """Sets the sum of two batches' gradients."""
    model, optimizer, loader = training(worker, perceptron(), count=count)
    total: list[Tensor] = []
    for number, batch in enumerate(loader, 1):
        gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        total = [a + b for a, b in zip(total, gradients, strict=True)] if total else list(gradients)
        if number % 2 == 0:
            for parameter, gradient in zip(model.parameters(), total, strict=True):
                parameter.grad = gradient
            optimizer.step()
            total = []
    return model


def group_schedules(worker: Any) -> nn.Module:
    """A schedule of its own for each group of parameters, and rates that are set by hand besides."""
    model = perceptron()
    optimizer = momentum([{"params": model[1].parameters()}, {"params": model[3].parameters(), "lr": 0.01}])
    scheduler = LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])
    model, optimizer, loader = worker.prepare(model, optimizer, loader_of(samples(43)))
    for batch in loader:
        plain_step(model, optimizer, batch)
        scheduler.step()
        optimizer.param_groups[0]["lr"] *= 0.95
    return model


def compiled_after(worker: Any) -> nn.Module:
    model, optimizer, loader = training(worker, perceptron())
    quick = torch.compile(model, backend="eager")
    for batch in loader:
        plain_step(quick, optimizer, batch)
    return model


def swapping(worker: Any) -> nn.Module:
    """Looks at an average of the weights in the model's place after every step, and puts its own back."""
    model, optimizer, loader = training(worker, perceptron())
    average = [p.detach().clone() for p in model.parameters()]
    for batch in loader:
        plain_step(model, optimizer, batch)
        kept = [p.data for p in model.parameters()]
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
            parameter.data = mean
        model(batch[0])
        for own, parameter in zip(kept, model.parameters(), strict=True):
            parameter.data = own
    return model


def too_many(worker: Any, *, at: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Each rank calls backward as many times more as its number, before the `at`-th step or after all."""
    model, optimizer, loader = training(worker, perceptron(dtype), count=91)
    for number, (x, y, _) in enumerate(loader, 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(dtype)), y).backward()
        for _ in range(worker.rank if number == at else 0):
            model(x.to(dtype)).square().mean().backward()
        optimizer.step()
    for _ in range(0 if at else worker.rank):
        model(x.to(dtype)).square().mean().backward()
    return model
