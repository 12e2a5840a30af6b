"""Optimizers load torch's compiler late: what they compute is the same without it, and torch has its own code back once
it is loaded."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

PREAMBLE = """
import sys
import torch
from torch import nn
from torch.optim import Optimizer
from paceline.late_compiler import load_compiler_late

KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop)

def trained(kind, compiled=False):
    torch.manual_seed(5)
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    inputs = torch.randn(6, 4)
    def step():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    step = torch.compile(step, backend="eager") if compiled else step
    for _ in range(3):
        step()
        optimizer.load_state_dict(optimizer.state_dict())
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

def is_loaded():
    return "torch._dynamo" in sys.modules
"""


def run(code: str) -> None:
    """In a program that has loaded nothing yet."""
    done = subprocess.run([sys.executable, "-c", PREAMBLE + dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_optimizers_train_alike_without_the_compiler() -> None:
    run(
        """
        load_compiler_late()
        without = [trained(kind) for kind in KINDS]
        assert not is_loaded()
        import torch._dynamo
        assert all(torch.equal(own, trained(kind)) for own, kind in zip(without, KINDS, strict=True))
        """
    )


def test_torch_has_its_own_code_back_once_something_is_compiled() -> None:
    run(
        """
        SGD, methods = torch.optim.SGD, (Optimizer.zero_grad, Optimizer.add_param_group)
        step = SGD.step
        own = step.__code__
        load_compiler_late()
        load_compiler_late()
        assert step.__code__ is not own
        assert all("__dynamo_disable" in vars(method.__wrapped__) for method in methods)
        alone = trained(SGD)
        assert not is_loaded()
        assert torch.equal(trained(SGD, compiled=True), alone)
        assert is_loaded() and step.__code__ is own and SGD.step.__wrapped__ is step
        told = [vars(method.__wrapped__).get("__dynamo_disable") for method in methods]
        assert all(each is not method.__wrapped__ for each, method in zip(told, methods, strict=True))
        assert told[0] is not None
        """
    )


def test_nothing_changes_where_the_compiler_is_loaded() -> None:
    run(
        """
        import torch._dynamo
        own = torch.optim.SGD.step.__code__
        load_compiler_late()
        assert torch.optim.SGD.step.__code__ is own
        assert "__dynamo_disable" not in vars(Optimizer.zero_grad.__wrapped__)
        """
    )


def test_hooks_and_a_step_that_may_be_differentiated_are_as_with_it() -> None:
    run(
        """
        load_compiler_late()
        weight = torch.ones(2, requires_grad=True)
        held = weight.clone()
        optimizer = torch.optim.SGD([held], lr=0.5, differentiable=True)
        called = []
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        held.grad = held * 3
        optimizer.step()
        held.sum().backward()
        assert torch.equal(weight.grad, torch.full((2,), -0.5)) and called == ["before", "after"]
        assert torch.is_grad_enabled() and not is_loaded()
        """
    )
