"""A simulated cluster of alike hosts, and the least script that can be run on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from paceline.cluster.description import Cluster, Compute, Hosts, Servers
from paceline.running.result import Result
from paceline.training.worker import Worker
from tests.conformance import virtual_engine
from tests.conformance.rows import launched, loader_of, problem

STEP_S = 0.01
PLAIN = {"combine": "never"}  # else workers meet in the first step, to see whether the script changes gradients
GIGABIT = 125e6  # bytes per second
SCRIPT = """
import sys, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    worker = paceline.init()
    model = torch.nn.Linear(3, 1)
    data = DataLoader(TensorDataset(torch.ones(40, 3)), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
    model, optimizer, data = worker.prepare(model, optimizer, data)
    for (x,) in data:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""A file that takes its learning rate from the command line, and 20 steps over the workers."""


def cluster_of(
    *,
    gbit_per_s: float = 1000.0,
    latency_us: float = 0.0,
    slow: float | None = None,
    placement: Any = "separate",
    **compute: Any,
) -> Cluster:
    """Twenty alike hosts, of which the first may be slow."""
    hosts = [Hosts(count=20, bandwidth_gbit_per_s=gbit_per_s, latency_us=latency_us, memory_gbyte_per_s=1e6)]
    if slow is not None:
        hosts.insert(0, Hosts(name="slow", speed=slow, bandwidth_gbit_per_s=gbit_per_s, latency_us=latency_us))
    return Cluster(hosts=tuple(hosts), compute=Compute(step_s=STEP_S, **compute), servers=Servers(placement=placement))


def run(
    script: Callable[..., Any], out: Path, strategy: str, workers: int, *, cluster: Cluster, **settings: Any
) -> Result:
    return virtual_engine.run(
        partial(launched, script, out), strategy=strategy, workers=workers, out=out / "run", cluster=cluster, **settings
    )


def tiny(worker: Worker, out: Path) -> None:
    """As little as can be trained, for as long as the run lasts."""
    model = nn.Linear(10, 4)
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1e-3), loader_of(problem()))
    while True:
        for x, y, _ in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
