"""What rows of tables cost on the virtual engine besides what passes the links, worked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from paceline.cluster.description import Cluster, Communication, Servers
from paceline.engines.virtual.computing import requests
from paceline.nn import ShardedEmbedding
from paceline.training.worker import Worker
from tests.conformance.rows import loader_of, problem
from tests.conformance.virtual_cluster import cluster_of, run

NUM_KEYS, DIM, NUM_STEPS = 100, 8, 12
RATE = 1e6
"""Bytes a second, at which rows take most of the time."""
WORKER_S, SERVER_S = 1e-3, 2e-3


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = ShardedEmbedding(1000, DIM, optimizer="sgd:lr=0.1", name="rows")
        self.last = nn.Linear(DIM, 1)

    def forward(self, keys: Tensor) -> Tensor:
        found: Tensor = self.last(self.rows(keys)).mean()
        return found


def looking(worker: Worker, out: Path) -> None:
    """Every worker has the same keys in each step."""
    model = Looking()
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1e-3), loader_of(problem()))
    while True:
        for _ in loader:
            optimizer.zero_grad()
            model(torch.arange(NUM_KEYS)).backward()
            optimizer.step()


def with_rate(cluster: Cluster, bytes_per_s: float) -> Cluster:
    """Rows are picked out so fast."""
    hosts = tuple(replace(host, row_gbyte_per_s=bytes_per_s / 1e9) for host in cluster.hosts)
    return replace(cluster, hosts=hosts)


def free(cluster: Cluster) -> Cluster:
    return with_rate(cluster, 1e15)


def costly(cluster: Cluster) -> Cluster:
    communication, servers = Communication(request_us=WORKER_S * 1e6), Servers(request_us=SERVER_S * 1e6)
    return replace(with_rate(cluster, RATE), communication=communication, servers=servers)


def times_s(out: Path, workers: int, cluster: Cluster) -> list[float]:
    """When the first worker's steps end."""
    result = run(looking, out, "ps-bsp", workers, cluster=cluster, max_steps=NUM_STEPS, options={"combine": "never"})
    return [step.time_s for step in result.steps if step.worker == 0]


def mean_s(ends_s: Sequence[float]) -> float:
    return (ends_s[-1] - ends_s[1]) / (len(ends_s) - 2)


def step_s(out: Path, workers: int, *, costs: bool) -> float:
    return mean_s(times_s(out, workers, (costly if costs else free)(cluster_of())))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_with_rows(workers: int, tmp_path: Path) -> None:
    """A worker asks for rows, sends gradients of rows, and pushes those of the model: three requests, which all workers
    make at the same time. Keys, rows, and gradients with their keys are each picked out by one end and taken by the
    other; the server joins several workers' gradients of rows, and reads each gradient once for its update, and the
    row, which it writes. It does one thing at a time, so that a worker which is answered first comes first again."""
    keys_s, rows_s = 8 * NUM_KEYS / RATE, 4 * DIM * NUM_KEYS / RATE
    at_workers_s = 3 * WORKER_S + keys_s + rows_s + (keys_s + rows_s)
    at_server_s = 3 * SERVER_S + (keys_s + rows_s) + (keys_s + rows_s)
    joining_s = 3 * workers * (keys_s + rows_s) if workers > 1 else 0.0
    update_s = 3 * rows_s
    found_s = step_s(tmp_path / "a", workers, costs=True) - step_s(tmp_path / "b", workers, costs=False)
    if workers == 1:
        assert found_s == pytest.approx(at_workers_s + at_server_s + update_s, rel=0.001)
    else:
        least_s, most_s = (at_workers_s + n * at_server_s + joining_s + update_s for n in (1, workers))
        assert least_s < found_s <= most_s * 1.001


def test_requests_about_rows_have_costs_of_their_own(tmp_path: Path) -> None:
    """Of three requests two are about rows. Where the cores are shared, these two need more of the one that there
    is."""
    said = Communication(request_us=WORKER_S * 1e6, row_request_us=3e3, row_request_core_us=9e3)
    cluster = free(replace(cluster_of(), communication=said, servers=Servers(request_us=2e3, row_request_us=5e3)))
    plain_s = mean_s(times_s(tmp_path / "free", 1, free(cluster_of())))
    alone_s = mean_s(times_s(tmp_path / "alone", 1, cluster)) - plain_s
    assert alone_s == pytest.approx(WORKER_S + SERVER_S + 2 * (3e-3 + 5e-3), rel=0.001)
    shared_s = mean_s(times_s(tmp_path / "shared", 1, replace(cluster, shared_cores=1))) - plain_s
    assert shared_s == pytest.approx(WORKER_S + SERVER_S + 2 * (4.5e-3 + 5e-3), rel=0.001)


def test_requests_about_rows_vary_alike_each_time(tmp_path: Path) -> None:
    said = Communication(row_request_us=3e3, row_request_variation=0.5)
    cluster = free(replace(cluster_of(), communication=said))
    first, again = (times_s(tmp_path / name, 1, cluster) for name in "ab")
    assert first == again
    steps_s = [after - before for before, after in pairwise(first[1:])]
    assert max(steps_s) - min(steps_s) > 1e-3
    steady = replace(cluster, communication=replace(said, row_request_variation=0.0))
    steps_s = [after - before for before, after in pairwise(times_s(tmp_path / "c", 1, steady)[1:])]
    assert max(steps_s) - min(steps_s) < 1e-5


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x)).mean()
        return found


def two_optimizers(worker: Worker, out: Path) -> None:
    """One model, whose parts are on the servers by themselves."""
    model = TwoParts()
    model, first, second, loader = worker.prepare(
        model=model,
        first=SGD(model.first.parameters(), lr=1e-3),
        second=SGD(model.second.parameters(), lr=1e-3),
        loader=loader_of(problem()),
    )
    while True:
        for _ in loader:
            model(torch.full((DIM,), 1.0 + worker.rank)).backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()


def test_each_optimizer_of_a_worker_draws_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    of_workers = requests.of_workers

    def seen(cluster: Cluster, random: Random) -> requests.RequestCosts:
        drawn.append(random.random())
        return of_workers(cluster, random)

    monkeypatch.setattr(requests, "of_workers", seen)
    run(two_optimizers, tmp_path, "ps-bsp", 2, cluster=cluster_of(), max_steps=2)
    assert len(set(drawn)) == 2 * 2
