"""How many calls in Python a step makes besides training: after a backward pass each takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.comm.alone import AloneCollective
from paceline.config import RunConfig
from paceline.membership import Membership
from paceline.records import NullReporter
from paceline.strategies import build
from paceline.strategies.base import Context
from paceline.training.given import told_apart
from paceline.training.session import Session

OWN = str(Path(paceline.__file__).parent)
LOADING = "torch/utils/data"


def script() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(64, 8), torch.arange(64) % 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4, shuffle=True)


def files_of_calls(step: Callable[[], object]) -> list[str]:
    """The file of each function in Python that it calls."""
    files: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return files


@pytest.mark.parametrize(
    ("strategy", "options", "most"), [("single", {}, 22), ("fed-avg", {"clients": 2, "fraction": 1.0}, 27)]
)
def test_a_step_makes_few_calls(strategy: str, options: dict[str, object], most: int) -> None:
    context = Context(0, Membership.first(1), 0, 1, torch.device("cpu"), AloneCollective())
    session = Session(context, build(strategy, options), RunConfig(seed=0), NullReporter())
    model, optimizer, loader = script()
    [prepared] = session.prepare(told_apart((model, optimizer, loader), {})).values()
    batches = iter(prepared)

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(3):
        step()
    files = files_of_calls(step)
    session.release()
    assert sum(file.startswith(OWN) for file in files) <= most
    assert not any(LOADING in file for file in files), "torch's loader is left out"
