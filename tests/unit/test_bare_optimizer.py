"""A prepared optimizer's own step and zero_grad: what torch wraps around them is left out where nobody would see it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.training.bare_optimizer import bare_step, bare_zero_grad

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adam-foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True),
}


class Halving(torch.optim.SGD):
    """A script's own optimizer."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def backward(model: nn.Module) -> None:
    model(torch.arange(6.0).view(2, 3)).square().sum().backward()


@pytest.mark.parametrize("kind", [*KINDS, "own"])
def test_it_steps_as_the_whole_one_does(kind: str) -> None:
    models = model_of(), model_of()
    make = KINDS.get(kind, lambda parameters: Halving(parameters, lr=0.1))
    first, second = (make(model.parameters()) for model in models)
    step = bare_step(second)
    bare_zero_grad(second)
    for _ in range(3):
        for model, optimizer, take in zip(models, (first, second), (first.step, step), strict=True):
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
            backward(model)
            take()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("where", ["own before", "own after", "all before", "all after"])
def test_hooks_of_the_script_are_called(where: str) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, called = bare_step(optimizer), []

    def hook(*_: Any) -> None:
        called.append(where)

    of_paceline = register_optimizer_step_pre_hook(lambda *_: None)  # the one of UnpreparedSteps
    register = {
        "own before": optimizer.register_step_pre_hook,
        "own after": optimizer.register_step_post_hook,
        "all before": register_optimizer_step_pre_hook,
        "all after": register_optimizer_step_post_hook,
    }[where]
    handle = register(hook)
    step()
    handle.remove()
    step()
    of_paceline.remove()
    assert called == [where]


def test_a_profile_shows_steps_and_zero_grad() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = bare_step(optimizer)
    bare_zero_grad(optimizer)
    backward(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
        optimizer.zero_grad()
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= names


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_no_mark_is_made_where_nobody_profiles(has_scheduler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if has_scheduler:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = bare_step(optimizer)
    bare_zero_grad(optimizer)
    backward(model)
    before = next(model.parameters()).clone()

    def refuse(*_: Any) -> None:
        raise AssertionError("a mark was made")

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", refuse)
    step()
    optimizer.zero_grad()
    assert not torch.equal(before, next(model.parameters()))


def test_what_the_script_has_put_there_stays() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called: list[bool] = []
    own = optimizer.step

    @functools.wraps(own)
    def step(*_: Any) -> Any:
        called.append(False)
        return own()

    optimizer.step = step  # type: ignore[method-assign]
    bare_step(optimizer)()
    assert called == [False]
    called.clear()
    optimizer.zero_grad = lambda set_to_none=True: called.append(set_to_none)  # type: ignore[method-assign]
    bare_zero_grad(optimizer)
    optimizer.zero_grad()
    assert called == [True]


def test_gradients_are_set_to_zero_where_the_script_says_so() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bare_zero_grad(optimizer)
    backward(model)
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    assert model[0].weight.grad is not None  # type: ignore[index,union-attr]


def test_another_optimizers_step_stays_that_ones() -> None:
    """A script's optimizer that leaves steps to one inside it."""
    model = model_of()
    inner, outer = torch.optim.SGD(model.parameters(), lr=0.5), torch.optim.SGD(model.parameters(), lr=0.0)
    outer.step = inner.step  # type: ignore[method-assign]
    before = [parameter.clone() for parameter in model.parameters()]
    backward(model)
    bare_step(outer)()
    changed = [not torch.equal(*each) for each in zip(before, model.parameters(), strict=True)]
    assert any(changed)


def test_a_profiler_of_all_threads_sees_steps() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = bare_step(optimizer)
    bare_zero_grad(optimizer)
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=options) as seen:
        backward(model)
        step()
        optimizer.zero_grad()
    names = {event.name for event in seen.events()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= names
