"""Virtual workers that share a device: the cores, and a GPU where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from paceline.errors import RunFailed
from paceline.running.result import Result
from paceline.training.worker import Worker
from tests.conformance.rows import loader_of, network, problem
from tests.conformance.virtual_cluster import cluster_of, run

every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
every_strategy = pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp", "ps-asp"])

CLUSTER = cluster_of(gbit_per_s=0.01, distribution="exponential")


def train_on_device(worker: Worker, out: Path) -> None:
    """Draws from the device's random numbers in each step, in dropout and by itself."""
    model = nn.Sequential(network(), nn.Dropout(0.2))
    model, optimizer, loader = worker.prepare(
        model, SGD(model.parameters(), lr=0.1, momentum=0.5), loader_of(problem())
    )
    for x, y, _ in loader:
        x, y = x.to(worker.device), y.to(worker.device)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        worker.log(is_gpu=float(next(model.parameters()).is_cuda), draw=torch.rand(1, device=worker.device))


def draws(result: Result, worker: int) -> list[float]:
    return [metric.value for metric in result.logged if metric.name == "draw" and metric.worker == worker]


@every_device
@every_strategy
def test_the_device_is_used_and_the_same_seed_gives_the_same_run(strategy: str, device: Any, tmp_path: Path) -> None:
    first, again = (
        run(train_on_device, tmp_path / name, strategy, 4, cluster=CLUSTER, device=device) for name in ("1", "2")
    )
    assert {metric.value for metric in first.logged if metric.name == "is_gpu"} == {float(device == "cuda")}
    for name in ("steps.csv", "metrics.csv", "model.safetensors"):
        assert (first.directory / name).read_bytes() == (again.directory / name).read_bytes()


@every_device
def test_random_numbers_of_a_device_are_each_workers_own(device: Any, tmp_path: Path) -> None:
    """What a worker draws does not depend on how many others there are."""
    few, many = (
        run(
            train_on_device, tmp_path / str(workers), "all-reduce", workers, cluster=CLUSTER, device=device, max_steps=4
        )
        for workers in (2, 5)
    )
    for worker in range(2):
        assert len(set(draws(few, worker))) == 4
        assert draws(few, worker) == draws(many, worker)
    assert draws(many, 0) != draws(many, 1)


def train_plainly(worker: Worker, out: Path) -> None:
    model = network()
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
    for x, y, _ in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(worker.device)), y.to(worker.device)).backward()
        optimizer.step()


@pytest.mark.gpu
@every_strategy
def test_a_gpu_gives_what_cores_give(strategy: str, tmp_path: Path) -> None:
    """Times to the bit, and parameters but for rounding."""
    on_cores, on_gpu = (
        run(train_plainly, tmp_path / device, strategy, 4, cluster=CLUSTER, device=device) for device in ("cpu", "cuda")
    )
    assert on_gpu.steps == on_cores.steps
    for name, expected in on_cores.model_state().items():
        torch.testing.assert_close(on_gpu.model_state()[name].cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_missed(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="--device cuda: this machine has no GPU; use --device cpu"):
        run(train_plainly, tmp_path, "all-reduce", 2, cluster=CLUSTER, device="cuda")
