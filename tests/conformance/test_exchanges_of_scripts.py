"""Tensors that require gradients in a script's own exchanges: they come back without, and the script is told once."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from paceline.errors import RunFailed
from tests.conformance import odd_losses, virtual_engine
from tests.conformance.odd_judging import ENGINES
from tests.conformance.scripts import launched

TOLD = r"rank \d: \w+ of a tensor that requires a gradient gives .* parts = worker\.all_gather\(tensor\.detach\(\)\)"


def tensors(worker: Any) -> Tensor:
    return (torch.full((2,), 1.0 + worker.rank, requires_grad=True) * 2).clone()


def each(worker: Any, tensor: Tensor) -> list[Tensor]:
    """What every exchange gives of a tensor with a history."""
    many = [tensor] * worker.size
    other = (worker.rank + 1) % worker.size
    found = [
        *worker.all_gather(tensor),
        *(worker.gather(tensor) or ()),
        worker.scatter(many if worker.rank == 0 else None),
        worker.reduce_scatter(many),
        *worker.all_to_all(many),
        worker.all_reduce_tree({"loss": (tensor, 1.0)})["loss"][0],
        worker.broadcast_tree([tensor])[0],
        *(each[1] for each in worker.all_gather_object([1.0, tensor])),
        worker.broadcast_object(OrderedDict(losses=(1, [tensor])))["losses"][1][0],
        worker.all_reduce(tensor.clone()),
        worker.broadcast(tensor.clone()),
    ]
    if worker.size > 1 and worker.rank == 0:
        worker.send(tensor, destination=other)
    elif worker.size > 1:
        found.append(worker.recv(tensor.clone(), source=other))
    return found


def script(is_told: bool) -> None:
    """Gradients are switched on, or nothing is told."""
    worker = paceline.init()
    tensor = tensors(worker)
    with warnings.catch_warnings(record=True) as told, torch.set_grad_enabled(is_told):
        warnings.simplefilter("always")
        found = each(worker, tensor)
    assert not any(each.requires_grad for each in found)
    wanted = [f"rank {worker.rank}: all_gather"] if is_told else []
    assert [str(each.message).split(" of a tensor")[0] for each in told] == wanted
    assert tensor.requires_grad
    assert found[0].tolist() == [2.0, 2.0]
    odd_losses.weigh_by_norm(worker, first=100)  # a run trains


@pytest.mark.parametrize(("workers", "is_told"), [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_comes_back_requires_no_gradient_and_is_told_once(
    engine: str, workers: int, is_told: bool, tmp_path: Path
) -> None:
    strategy = "single" if workers == 1 else "all-reduce"
    ENGINES[engine].run(partial(script, is_told), strategy=strategy, workers=workers, out=tmp_path)


def test_a_loss_of_all_workers_outputs_is_told(tmp_path: Path) -> None:
    script = partial(launched, odd_losses.SCRIPTS["others' outputs in the loss"])
    with pytest.warns(UserWarning, match=TOLD):
        result = virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path)
    told = [event.details for event in result.events if event.name == "gradient_left_out"]
    assert told == [{"call": "all_gather"}]


@pytest.mark.filterwarnings("ignore:rank .* of a tensor that requires a gradient")
def test_a_backward_pass_that_needs_what_was_overwritten_fails(tmp_path: Path) -> None:
    """`exp` keeps what it gave, which is the sum of all workers' now."""

    def script() -> None:
        worker = paceline.init()
        given = torch.ones(2, requires_grad=True)
        output = given.exp()
        worker.all_reduce(output)
        output.sum().backward()

    with pytest.raises(RunFailed, match="modified by an inplace operation"):
        virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path)
