"""Losses that are no mean over a batch or have parameters, for which `test_odd_hunted.py` has no place."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader

import paceline
from paceline.errors import RunFailed
from tests.conformance import odd_losses, virtual_engine
from tests.conformance.odd_hunted import train
from tests.conformance.reference import train_alone
from tests.conformance.scripts import (
    BATCH_SIZE,
    EXACT,
    assert_close,
    launched,
    loader_of,
    momentum,
    perceptron,
    plain_step,
    samples,
)


def test_a_sum_of_parts_is_told(tmp_path: Path) -> None:
    step = partial(odd_losses.in_parts, divides=False)
    script = partial(launched, partial(odd_losses.own_loop, step=step))
    with pytest.warns(UserWarning, match=r"calls backward\(\) for one part of a batch .*divide each loss"):
        virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path)


def test_a_sum_of_terms_that_share_nothing_is_told(tmp_path: Path) -> None:
    step = partial(odd_losses.looped, is_mean=False, is_cut=False)
    script = partial(launched, partial(odd_losses.own_loop, step=step))
    with pytest.warns(UserWarning, match=r"adds up 4 terms, as many as samples.*unless each is of a model of its own"):
        virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path)


@pytest.mark.parametrize("script", [odd_losses.weighed_by_all, odd_losses.quotient_of_all])
@pytest.mark.parametrize("strategy", ["all-reduce", pytest.param("ps-bsp", marks=pytest.mark.slow)])
def test_a_loss_by_what_all_batches_weigh_is_one_process_s(strategy: str, script: Any, tmp_path: Path) -> None:
    result = virtual_engine.run(partial(launched, script), strategy=strategy, workers=2, out=tmp_path)
    assert_close(result.model_state(), train_alone(script, 2), EXACT)


@pytest.mark.parametrize("strategy", ["gossip", "local-sgd:every=2", "ps-asp"])
def test_the_same_script_trains_where_each_step_is_of_one_batch(strategy: str, tmp_path: Path) -> None:
    script = partial(launched, odd_losses.weighed_by_all)
    result = virtual_engine.run(script, strategy=strategy, workers=2, out=tmp_path)
    assert all(tensor.isfinite().all() for tensor in result.model_state().values())


def test_gradients_that_are_read_late_are_told(tmp_path: Path) -> None:
    def script() -> None:
        worker = paceline.init()
        worker.evaluation(lambda model: {"norm": float(next(model.parameters()).norm())})
        odd_losses.weigh_by_norm(worker, first=2)

    with pytest.warns(UserWarning, match=r"step \d+: the script reads gradients .*combine=always"):
        virtual_engine.run(script, strategy="ps-bsp", workers=2, out=tmp_path, eval_every="3")


def without_a_step(worker: Any) -> nn.Module:
    """Adds up squared gradients over a pass between two of training, as Fisher's information has it."""
    model = perceptron()
    model, optimizer, loader = worker.prepare(model, momentum(model.parameters()), loader_of(samples()))
    squares: list[Any] = [0.0 for _ in model.parameters()]
    for number, batch in enumerate(itertools.chain(loader, loader, loader)):
        if number // len(loader) != 1:
            plain_step(model, optimizer, batch)
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        squares = [total + p.grad.square() for total, p in zip(squares, model.parameters(), strict=True)]
    return model


def test_gradients_that_are_read_without_a_step_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"step 13: the script reads gradients .*combine=always"):
        virtual_engine.run(partial(launched, without_a_step), strategy="ps-bsp", workers=2, out=tmp_path)


class Weighing(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, labels: Tensor) -> Any:
        return torch.exp(-self.scale) * F.cross_entropy(output, labels) + self.scale


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def in_loss(worker: Any) -> None:
    model, loss = perceptron(), Weighing()
    worker.prepare(model, momentum([*model.parameters(), *loss.parameters()]), loader())


def in_wrapper(worker: Any) -> None:
    model = perceptron()
    worker.prepare(model, Wrapper(momentum(model.parameters())), loader())


def in_two(worker: Any) -> None:
    model = perceptron()
    one, other = momentum(model.parameters()), SGD(model[1].parameters(), lr=0.1)
    worker.prepare(model=model, one=one, other=other, data=loader())


def scripted(worker: Any) -> None:
    model = torch.jit.script(nn.Sequential(perceptron()))
    worker.prepare(model, momentum(model.parameters()), loader())


def loader() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH_SIZE)


@pytest.mark.parametrize(
    ("script", "remedy"),
    [
        (in_loss, r"parameter 4 .*prepare\(model=\.\.\., loss=\.\.\., optimizer=\.\.\., data=\.\.\.\)"),
        (scripted, r"the module 'itself' is of torch\.jit\.script.*torch\.compile"),
        (in_wrapper, r"takes a torch\.optim\.Optimizer, not Wrapper.*give prepare the one inside"),
        (in_two, r"'one' and 'other' both hold the parameter '1\.weight'.*one optimizer with all"),
    ],
)
def test_a_refusal_names_the_remedy(script: Any, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=remedy):
        virtual_engine.run(partial(launched, script), strategy="single", workers=1, out=tmp_path)


def test_a_loss_with_parameters_may_be_prepared(tmp_path: Path) -> None:
    def script() -> None:
        model, loss = perceptron(), Weighing()
        model, loss, optimizer, data = paceline.init().prepare(
            model=model, loss=loss, optimizer=momentum([*model.parameters(), *loss.parameters()]), data=loader()
        )
        for x, y, _ in data:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

    result = virtual_engine.run(script, strategy="ps-bsp", workers=2, out=tmp_path)
    assert float(result.model_state()["loss.scale"]) != 0.0


def test_that_workers_combine_is_told_with_the_line_that_reads(tmp_path: Path) -> None:
    run = partial(virtual_engine.run, strategy="ps-bsp", workers=2)
    reads = run(partial(launched, partial(odd_losses.weigh_by_norm, first=1)), out=tmp_path / "reads")
    (told,) = [event for event in reads.events if event.name == "combining"]
    assert told.details["why"].startswith("in its first step the script reads gradients (odd_habits.py:")
    assert told.details["why"].endswith("between backward() and step() on rank 0")
    plain = run(partial(launched, train), out=tmp_path / "plain")
    assert not [event for event in plain.events if event.name == "combining"]
