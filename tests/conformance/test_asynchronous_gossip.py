"""AD-PSGD on engines: nobody waits for a slow worker, and a run ends where it was told to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.errors import RunFailed, UsageError
from paceline.records import StepRecord, record_path
from paceline.running.result import Result
from paceline.strategies import build
from paceline.strategies.gossip import AsynchronousGossip
from paceline.topology import Chain, Ring, Star, Topology
from paceline.training.worker import Worker
from tests.conformance.rows import SELDOM, keep, prepared, step, steps_of
from tests.conformance.test_gossip import Point, every_engine, run

STEP_S, SLOW = 0.01, 3
"""Seconds, and the rank of the slow worker."""


def cluster_of(*, speed: float = 1.0) -> Cluster:
    """Eight hosts, of which one may be slow."""
    link = {"bandwidth_gbit_per_s": 1.0}
    hosts = (Hosts(count=SLOW, **link), Hosts(name="slow", speed=speed, **link), Hosts(count=7 - SLOW, **link))
    return Cluster(hosts=hosts, compute=Compute(step_s=STEP_S, distribution="log-normal", variation=0.1))


def train_for_long(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    worker.evaluation(lambda model: {"zero": 0.0})
    while True:
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)


def steps_per_s(result: Result) -> list[float]:
    """Each worker's, by its own clock, which stands in pauses."""
    return [len(steps) / steps[-1].time_s for steps in (steps_of(result, rank) for rank in range(8))]


@pytest.mark.parametrize("topology", [Ring(), Chain()], ids=str)
def test_a_slow_worker_slows_nobody_else(topology: Topology, tmp_path: Path) -> None:
    """Ten times slower, in a run that pauses now and then."""
    settings = {"max_time_s": 0.5, "eval_every": 150}
    strategy = AsynchronousGossip(topology=topology, own_scores=False)
    alike = steps_per_s(run(train_for_long, tmp_path / "alike", strategy, cluster=cluster_of(), **settings))
    slow = steps_per_s(run(train_for_long, tmp_path / "slow", strategy, cluster=cluster_of(speed=0.1), **settings))
    assert slow[SLOW] < 0.15 * alike[SLOW]
    assert all(slow[rank] > 0.95 * alike[rank] for rank in range(8) if rank != SLOW)


def test_a_slow_worker_slows_all_who_wait_for_neighbours(tmp_path: Path) -> None:
    result = run(train_for_long, tmp_path, "d-psgd", cluster=cluster_of(speed=0.1), max_time_s=2.0)
    assert max(steps_per_s(result)) < 0.25 / STEP_S


def train_with_a_slow_worker(worker: Worker, out: Path, *, num_steps: int = 30) -> None:
    """Every gradient is -1, at a learning rate of 1: a model says how many steps it has had."""
    model, data = Point(50), TensorDataset(torch.zeros(4 * worker.size))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1.0), DataLoader(data))
    worker.evaluation(lambda model: {"mean": float(next(model.parameters()).mean())})
    for _ in range(num_steps // 4):
        for _ in loader:
            optimizer.zero_grad()
            model(model.x.detach() + 1).backward()
            optimizer.step()
    keep(out, f"ended-{worker.rank}", worker.iteration)


@every_engine
@pytest.mark.parametrize("topology", [pytest.param(Ring(), marks=pytest.mark.slow), Star()], ids=str)
def test_every_gradient_counts_once_in_the_mean(engine: str, topology: Topology, tmp_path: Path) -> None:
    strategy = AsynchronousGossip(topology=topology, own_scores=False)
    result = run(train_with_a_slow_worker, tmp_path, strategy, workers=4, engine=engine, eval_every=10, max_steps=90)
    assert result.iteration == 90
    assert len([record for record in result.steps if record.staleness >= 0]) == 90
    for evaluation in result.evaluations:
        assert evaluation.metrics["mean"] == pytest.approx(evaluation.iteration / 4, rel=1e-12)
    assert [evaluation.iteration // 10 for evaluation in result.evaluations] == list(range(10))


@every_engine
def test_a_run_ends_at_one_iteration_when_its_data_do(engine: str, tmp_path: Path) -> None:
    result = run(train_with_a_slow_worker, tmp_path, "ad-psgd", workers=4, engine=engine)
    assert result.iteration == 4 * 28
    assert float(next(iter(result.model_state().values())).mean()) == pytest.approx(28.0, rel=1e-12)


def test_all_stop_when_the_time_is_over(tmp_path: Path) -> None:
    result = run(train_for_long, tmp_path, "ad-psgd", cluster=cluster_of(speed=0.1), max_time_s=0.4)
    checkpoint = Checkpoint.decode((tmp_path / FILE_NAME).read_bytes(), where="")
    assert checkpoint.iteration == result.iteration == len(result.steps)
    assert result.training_time_s < 0.4 + 0.15  # the slow one ends its step


def test_staleness_is_what_has_come_meanwhile(tmp_path: Path) -> None:
    """A pair, of which one makes ten steps while the other makes one."""
    link = {"bandwidth_gbit_per_s": 1.0}
    hosts = (Hosts(**link), Hosts(name="slow", speed=0.1, **link))
    cluster = Cluster(hosts=hosts, compute=Compute(step_s=STEP_S))
    result = run(
        train_for_long, tmp_path, "ad-psgd", workers=2, cluster=cluster, max_steps=200, checkpoint_every=SELDOM
    )
    found = {rank: [record.staleness for record in steps_of(result, rank)][2:-2] for rank in (0, 1)}
    assert 8 <= min(found[1]) <= max(found[1]) <= 11
    assert max(found[0]) == 1


def test_the_same_run_twice(tmp_path: Path) -> None:
    for name in ("one", "other"):
        run(train_for_long, tmp_path / name, "ad-psgd", max_steps=200, eval_every=50)
    for file in (record_path(Path(), StepRecord).name, "model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


def test_an_exchange_moves_behind_the_gradient(tmp_path: Path) -> None:
    """Each asker sends a model a step, and each gets as much."""
    result = run(train_for_long, tmp_path, "ad-psgd", workers=4, cluster=cluster_of(), max_steps=400)
    late = [record for record in result.steps if record.step > 3]
    assert sum(record.communication_s + record.waiting_s for record in late) < 0.02 * sum(r.time_s for r in late)
    model_bytes = 4 * (10 * 16 + 16 + 16 * 4 + 4)
    askers = [record.moved_bytes for record in late if record.worker % 2 == 0]
    assert model_bytes <= sum(askers) / len(askers) < 1.6 * model_bytes


def change_in_place(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)


def test_parameters_that_a_script_changes_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"step 2: the script changed parameter '0\.weight' in place on rank"):
        run(change_in_place, tmp_path, "ad-psgd", workers=2)


def test_topologies_without_two_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="5 workers do not fall into those who ask and those who answer"):
        build("ad-psgd").check(num_workers=5)
