"""What a virtual run leaves in the process that it ran in: nothing of its workers."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.engines.virtual.engine import VirtualRun
from paceline.errors import RunFailed
from paceline.training.session import Session
from tests.conformance.virtual_cluster import cluster_of
from tests.conformance.virtual_engine import Silent
from tests.memory import held_bytes

NUM_WORKERS, NUM_RUNS = 4, 10
SIDE = 1000
RUN_BYTES = NUM_WORKERS * 3 * 4 * SIDE**2
"""Of all workers' parameters, gradients and momenta."""

every_strategy = pytest.mark.parametrize(
    "strategy", ["ps-asp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("all-reduce", "ps-bsp"))]
)


def train(*, fails: bool = False) -> None:
    worker = paceline.init()
    model = nn.Linear(SIDE, SIDE, bias=False)
    loader = DataLoader(TensorDataset(torch.ones(12, SIDE)), batch_size=1)
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1e-3, momentum=0.5), loader)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        if fails and worker.rank == 1 and worker.iteration:
            raise ValueError("as it was told")
        optimizer.step()


def run(strategy: str, out: Path, *, fails: bool = False) -> None:
    paceline.run(
        lambda: train(fails=fails),
        strategy=strategy,
        workers=NUM_WORKERS,
        engine="virtual",
        cluster=cluster_of(),
        out=out,
        watcher=Silent(),
    )


def num_left() -> int:
    """Runs and their workers' sessions."""
    return sum(type(thing) in (Session, VirtualRun) for thing in gc.get_objects())


@every_strategy
def test_many_runs_take_the_memory_of_one(strategy: str, tmp_path: Path) -> None:
    num_before, resident_bytes = num_left(), []
    for number in range(NUM_RUNS):
        run(strategy, tmp_path / str(number))
        assert num_left() <= num_before
        resident_bytes.append(held_bytes())
    assert resident_bytes[-1] - resident_bytes[0] < RUN_BYTES


@every_strategy
def test_nor_does_a_failed_run_leave_its_workers(strategy: str, tmp_path: Path) -> None:
    num_before = num_left()
    with pytest.raises(RunFailed, match="as it was told"):
        run(strategy, tmp_path / "run", fails=True)
    gc.collect()
    assert num_left() <= num_before
