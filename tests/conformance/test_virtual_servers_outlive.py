"""Simulated hosts fail and are taken away under servers: these go on without a worker, whose last gradient counts on
all of them or on none, rows of tables with it, and with one who comes."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster, Compute, Hosts, Recovery, Servers
from paceline.elastic import Elastic
from paceline.engines.virtual.survival.lives import Lives
from paceline.engines.virtual.survival.reforming import VirtualReforming
from paceline.errors import PeerLost, RunFailed
from paceline.nn import ShardedEmbedding
from paceline.records import UpdateRecord, read_records
from paceline.running.result import Result
from paceline.training import judging
from paceline.training.course import Course
from paceline.training.judging import Judge
from paceline.training.worker_run import WorkerRun
from tests.conformance.test_virtual_failures import named, require_adding_up
from tests.covering import in_turns

EPOCHS, SAMPLES, WORKERS, BATCH = 3, 96, 3, 4
WORKERS_HOSTS = Hosts(count=5, bandwidth_gbit_per_s=1.0, back_after_s=20.0, price_per_hour=3600.0)
SERVERS_HOSTS = Hosts(name="for servers", count=2, workers=0, bandwidth_gbit_per_s=1.0)
CLUSTER = Cluster(
    hosts=(WORKERS_HOSTS, SERVERS_HOSTS),
    compute=Compute(step_s=1.0, distribution="log-normal", variation=0.3),
    servers=Servers(placement="separate"),
    recovery=Recovery(reform_s=0.25, start_s=2.0),
)
FAILING = replace(CLUSTER, hosts=(replace(WORKERS_HOSTS, preemptions_per_hour=200.0, notice_s=0.0), SERVERS_HOSTS))
SPOT = replace(CLUSTER, hosts=(replace(WORKERS_HOSTS, preemptions_per_hour=200.0, notice_s=10.0), SERVERS_HOSTS))


class Tally(nn.Module):
    """Each gradient takes one from an element, and a row, for each of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ParameterList([torch.zeros(SAMPLES) for _ in range(2)])
        self.table = ShardedEmbedding(2**50, 1, optimizer="sgd:lr=0.5", std=0.0, name="samples")

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (
            -self.table(index * 2**40).sum() - self.halves[0][index].sum() - self.halves[1][index].sum()
        )
        return loss


Log = dict[int, list[list[int]]]
"""By worker, the samples of each batch that it has computed."""


def train(
    out: Path, strategy: str, cluster: Cluster, *, log: Log | None = None, every: int = 12, **elastic: Any
) -> Result:
    def script() -> None:
        worker, model = paceline.init(), Tally()
        if worker.size > 1:  # who joins has to be told
            model.table.lr = 1.0
        loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True)
        prepared, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
        worker.evaluation(lambda model: {"loss": float(model(torch.arange(SAMPLES)))})
        for _ in range(EPOCHS):
            for (index,) in loader:
                optimizer.zero_grad()
                prepared(index).backward()
                if log is not None:
                    log.setdefault(worker.rank, []).append(index.tolist())
                optimizer.step()

    settings = {"at_least": 1, "at_most": 5, "replacements": 50, "global_batch": "grow", **elastic}
    return paceline.run(
        script,
        strategy=strategy,
        workers=WORKERS,
        options={"servers": 2},
        engine="virtual",
        cluster=cluster,
        eval_every=every,
        checkpoint_every=every,
        elastic=Elastic(**settings) if settings["at_least"] else None,
        out=out,
    )


def rows_of(result: Result) -> torch.Tensor:
    saved = load_file(result.directory / "rows.safetensors")
    assert saved["samples.keys"].tolist() == [number * 2**40 for number in range(SAMPLES)]
    return saved["samples.rows"][:, 0]


def replayed(result: Result, log: Log) -> torch.Tensor:
    """What one process makes of the batches that workers have written down, in the updates of the first server."""
    updates = [each for each in read_records(result.directory, UpdateRecord) if each.server == 0]
    of_update, counts = Counter(each.iteration for each in updates), torch.zeros(SAMPLES)
    next_of = {rank: iter(own) for rank, own in log.items()}
    for each in sorted(updates, key=lambda each: each.clock):
        counts[next(next_of[each.worker])] += 1 / of_update[each.iteration]
    assert all(len(list(left)) <= 1 for left in next_of.values()), "the last of one that died may count nowhere"
    return counts


def require_counted(result: Result, strategy: str, log: Log) -> None:
    """Each gradient counts on both servers, once, and there are as many as there are batches; rows have what the
    model's parameters have, which are of the same pushes, and what a replay has."""
    counted = Counter((each.server, each.worker, each.clock) for each in read_records(result.directory, UpdateRecord))
    assert set(counted.values()) == {1}
    on_each = [{each[1:] for each in counted if each[0] == server} for server in range(2)]
    assert on_each[0] == on_each[1]
    assert len(on_each[0]) == EPOCHS * SAMPLES // BATCH
    assert named(result, "left_over") == []
    assert result.evaluations[-1].samples == EPOCHS * SAMPLES
    rows, halves = rows_of(result), result.model_state()
    for half in (*halves.values(), replayed(result, log)):
        torch.testing.assert_close(rows, half, rtol=1e-5, atol=1e-6)
    if strategy != "ps-bsp":  # there each gradient is an update
        assert torch.equal(rows, torch.full((SAMPLES,), float(EPOCHS))), rows


STRATEGIES = ["ps-bsp", "ps-ssp", "ps-asp"]


@pytest.mark.parametrize(("how", "strategy"), in_turns(STRATEGIES, ("failing", "with notice"), are_quick=True))
def test_hosts_fail_and_others_come(tmp_path: Path, strategy: str, how: str) -> None:
    """The same run twice, bit for bit."""
    cluster = FAILING if how == "failing" else SPOT
    log: Log = {}
    first = train(tmp_path / "first", strategy, cluster, log=log)
    second = train(tmp_path / "second", strategy, cluster)
    assert len(named(first, "lost" if cluster is FAILING else "left")) > 1
    assert named(first, "let_in")
    require_counted(first, strategy, log)
    require_adding_up(first)
    for name in ("steps.csv", "updates.csv", "events.jsonl", "model.safetensors", "rows.safetensors"):
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_while_nobody_dies_it_is_the_static_run(tmp_path: Path, strategy: str) -> None:
    log: Log = {}
    static = train(tmp_path / "static", strategy, CLUSTER, at_least=0)
    elastic = train(tmp_path / "elastic", strategy, CLUSTER, log=log)
    require_counted(elastic, strategy, log)
    torch.testing.assert_close(rows_of(elastic), rows_of(static), rtol=1e-6, atol=0.0)


class Struck:
    """Has the hosts of workers go when that is said, beside those that are drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lives: list[Lives] = []
        begin = Lives.begin

        def begun(lives: Lives, hosts: Any) -> None:
            self._lives.append(lives)
            begin(lives, hosts)

        monkeypatch.setattr(Lives, "begin", begun)

    def strike(self, run: WorkerRun) -> None:
        process = cast(VirtualReforming, run.context.reform)._process
        process.post(self._lives[-1]._on_gone, run.context.rank)
        process.settle()


def test_what_only_the_dead_had_heard_of_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wait at the end when the third has pushed its last gradient, and dies before it meets them."""
    struck, finish, num_waiting = Struck(monkeypatch), Course.finish, [0]

    def finished(course: Course) -> None:
        num_waiting[0] += 1
        if num_waiting[0] == WORKERS:
            struck.strike(course._run)
        finish(course)

    monkeypatch.setattr(Course, "finish", finished)
    log: Log = {}
    result = train(tmp_path / "run", "ps-asp", CLUSTER, log=log, every=25, replacements=0)
    assert len(named(result, "lost")) == 1
    require_counted(result, "ps-asp", log)
    last, updates = result.evaluations[-1], read_records(result.directory, UpdateRecord)
    assert last.iteration == max(each.iteration for each in updates)
    whole = rows_of(result).sum() + sum(half.sum() for half in result.model_state().values())
    assert last.metrics["loss"] == pytest.approx(-float(whole), rel=1e-5)


@pytest.mark.parametrize("place", ["judge", "_found"])
def test_an_iteration_is_evaluated_and_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Also where the first worker dies in that pause, when all have heard what it has found, or nobody has."""
    struck, judge, is_struck = Struck(monkeypatch), getattr(Judge, place), [False]

    def judged(judge_of: Judge, model: nn.Module, now: Any, *given: Any) -> Any:
        found = judge(judge_of, model, now, *given)
        if judge_of._run.context.rank == 0 and now is not None and now.iterations >= 24 and not is_struck[0]:
            is_struck[0] = True
            struck.strike(judge_of._run)
        return found

    evaluated = []
    evaluate = judging.evaluate
    monkeypatch.setattr(judging, "evaluate", lambda *given, **named: evaluated.append(1) or evaluate(*given, **named))
    monkeypatch.setattr(Judge, place, judged)
    result = train(tmp_path / "run", "ps-bsp", CLUSTER)
    assert is_struck[0]
    assert len(named(result, "lost")) == 1
    iterations = [each.iteration for each in result.evaluations]
    assert 24 in iterations
    assert len(set(iterations)) == len(iterations)
    assert len(evaluated) == len(iterations) + (place == "_found")


def test_a_run_that_loses_a_server_begins_anew_from_its_checkpoint(tmp_path: Path) -> None:
    """Where it has one."""
    servers = replace(SERVERS_HOSTS, preemptions_per_hour=60.0, notice_s=0.0, back_after_s=1.0)
    result = train(tmp_path / "run", "ps-asp", replace(CLUSTER, hosts=(WORKERS_HOSTS, servers)))
    assert named(result, "restarted")
    assert result.evaluations[-1].samples == EPOCHS * SAMPLES


def test_too_few_are_left(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="1 workers are left, and --elastic asks for 2 or more"):
        train(tmp_path / "run", "ps-asp", FAILING, at_least=2, replacements=0)


@pytest.mark.parametrize("notice_s", [0.5, 1e4])
def test_who_is_told_before_all_train_stays(tmp_path: Path, notice_s: float) -> None:
    """It cannot leave yet, and nobody can come; with its host it dies as it would without word."""
    slow = replace(WORKERS_HOSTS, latency_us=1e6, preemptions_per_hour=3600.0, notice_s=notice_s)
    cluster = replace(CLUSTER, hosts=(slow, SERVERS_HOSTS))
    if notice_s < 1:
        with pytest.raises(RunFailed, match=r"worker \d died before training began"):
            train(tmp_path / "run", "ps-asp", cluster)
        return
    log: Log = {}
    result = train(tmp_path / "run", "ps-asp", cluster, log=log)
    assert not named(result, "left")
    require_counted(result, "ps-asp", log)


def test_a_meeting_that_is_broken_off_is_not_the_scripts_doing(tmp_path: Path) -> None:
    """Whoever dies in it: an evaluation may have changed parameters, which are as before at its end."""

    def script() -> None:
        worker, model = paceline.init(), nn.Linear(4, 1)
        loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=1)
        model, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        synchronizer = worker._session.run.prepared.synchronizer
        with suppress(PeerLost), torch.no_grad(), synchronizer.global_model():
            for parameter in model.parameters():  # as evaluations do that swap in averaged weights
                parameter.mul_(1.0)
            raise PeerLost("worker 1 is gone")
        with synchronizer.global_model():
            pass

    paceline.run(script, strategy="ps-asp", workers=2, engine="virtual", cluster=CLUSTER, out=tmp_path / "run")
