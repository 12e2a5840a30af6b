"""Simulated hosts fail and are taken away: elastic runs go on, and what that takes is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster, Compute, Hosts, Recovery
from paceline.elastic import Elastic
from paceline.errors import RunFailed
from paceline.planner import StepWork, failing, plan
from paceline.records import EventRecord, StepRecord, read_records
from paceline.running import simulating
from paceline.running.result import Result
from tests.covering import in_turns

EPOCHS, SAMPLES, WORKERS = 3, 96, 4
CLUSTER = Cluster(
    hosts=(Hosts(count=5, bandwidth_gbit_per_s=1.0, back_after_s=20.0, price_per_hour=3600.0),),
    compute=Compute(step_s=1.0),
    recovery=Recovery(reform_s=0.25, start_s=2.0),
)
FAILING = replace(CLUSTER, compute=replace(CLUSTER.compute, failures_per_hour=100.0))
OFTEN = replace(CLUSTER, compute=replace(CLUSTER.compute, failures_per_hour=200.0))
SPOT = replace(
    CLUSTER,
    hosts=(replace(CLUSTER.hosts[0], preemptions_per_hour=120.0, notice_s=10.0, spot_price_per_hour=1800.0),),
)


def train(
    out: Path,
    *,
    strategy: str = "all-reduce",
    cluster: Cluster = CLUSTER,
    checkpoint_every: int | None = None,
    epochs: int = EPOCHS,
    **elastic: Any,
) -> Result:
    """An elastic run, or, with `checkpoint_every`, one that begins anew from checkpoints."""
    log: Counter[tuple[int, int]] = Counter()

    def script() -> None:
        worker = paceline.init()
        generator = torch.Generator().manual_seed(1)
        inputs, labels = torch.randn(SAMPLES, 10, generator=generator), torch.arange(SAMPLES) % 4
        torch.manual_seed(3)
        model = nn.Linear(10, 4)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
        data = TensorDataset(inputs, labels, torch.arange(SAMPLES))
        loader = DataLoader(data, batch_size=4, shuffle=True)
        model, optimizer, loader = worker.prepare(model, optimizer, loader)
        worker.evaluation(lambda model: {"zero": 0.0})
        is_first = worker.size == 1  # a joiner's first batch is another's
        for epoch in range(epochs):
            for x, y, index in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                log.update((epoch, int(each)) for each in (() if is_first else index))
                is_first = False

    settings = {"at_least": 1, "at_most": 6, "replacements": 50, **elastic}
    result = paceline.run(
        script,
        strategy=strategy,
        workers=WORKERS,
        engine="virtual",
        cluster=cluster,
        checkpoint_every=checkpoint_every,
        elastic=None if checkpoint_every else Elastic(**settings),
        out=out,
    )
    assert result.evaluations[-1].samples == epochs * SAMPLES
    if strategy == "all-reduce" and not checkpoint_every:  # a round's samples count at its end
        each_once = Counter({(epoch, index): 1 for epoch in range(epochs) for index in range(SAMPLES)})
        # Who dies when a step is committed everywhere does not come to write it down.
        assert (log == each_once) if epochs == EPOCHS else not log - each_once
    return result


def named(result: Result, name: str) -> list[dict[str, Any]]:
    return [event.details for event in result.events if event.name == name]


def require_same_model(result: Result, other: Result) -> None:
    torch.testing.assert_close(result.model_state(), other.model_state(), rtol=1e-4, atol=1e-6)


def require_adding_up(result: Result) -> None:
    """What was lost, and what recorded steps took, are all of the workers' time but for the last steps' ends."""
    (told,) = named(result, "goodput")
    steps_s = sum(step.compute_s + step.communication_s for step in read_records(result.directory, StepRecord))
    lost_s = told["lost_regrouping_s"] + told["lost_steps_s"] + told["lost_starting_s"]
    assert told["goodput"] == pytest.approx(1 - lost_s / told["worker_s"])
    assert steps_s <= told["worker_s"] - told["lost_steps_s"] - told["lost_starting_s"] + 1e-3
    assert 0 < told["goodput"] < 1


def test_workers_die_with_their_hosts_and_others_take_their_place(tmp_path: Path) -> None:
    """The same run twice, bit for bit; the model is the undisturbed one's, and each sample counts once."""
    undisturbed = train(tmp_path / "undisturbed")
    first, second = (train(tmp_path / name, cluster=FAILING) for name in ("first", "second"))
    lost, reformed = named(first, "lost"), named(first, "reformed")
    assert len(lost) > 1
    assert any(event["joined"] for event in reformed)
    deaths = [event for event in reformed if not event["joined"]]
    assert all(3.25 <= event["took_s"] < 3.25 + 2 for event in deaths), (
        "the deadline, to form, and at most a step's rest"
    )
    require_same_model(first, undisturbed)
    require_adding_up(first)
    for name in ("steps.csv", "events.jsonl", "model.safetensors"):
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes()
    (none,) = named(undisturbed, "goodput")
    assert (none["goodput"], none["lost_steps_s"]) == (1.0, 0.0)
    assert none["cost"] == pytest.approx(none["worker_s"]), "each host costs one a second"


@pytest.mark.parametrize(
    ("how", "algorithm"),
    in_turns(["ring", "tree", "halving-doubling", "all-to-all"], ("failing", "with notice"), are_quick=True),
)
def test_named_algorithms_outlive_hosts(tmp_path: Path, algorithm: str, how: str) -> None:
    cluster = FAILING if how == "failing" else SPOT
    undisturbed = train(tmp_path / "undisturbed")
    result = train(tmp_path / "run", strategy=f"all-reduce:algorithm={algorithm}", cluster=cluster)
    assert len(named(result, "lost" if cluster is FAILING else "left")) > 1
    require_same_model(result, undisturbed)


def test_a_run_that_too_many_leave_has_failed(tmp_path: Path) -> None:
    """What they leave undone would be nobody's."""
    with pytest.raises(RunFailed, match="2 workers are left, and --elastic asks for 3 or more"):
        train(tmp_path / "spot", cluster=SPOT, at_least=3, replacements=0)
    events = read_records(tmp_path / "spot", EventRecord)
    assert [event.name for event in events if event.name in ("left", "ended", "failed")] == ["left", "left", "failed"]


def test_with_notice_nothing_that_was_computed_is_lost(tmp_path: Path) -> None:
    undisturbed, result = train(tmp_path / "undisturbed"), train(tmp_path / "spot", cluster=SPOT)
    assert len(named(result, "left")) > 1
    assert named(result, "lost") == []
    require_same_model(result, undisturbed)
    require_adding_up(result)
    (told,) = named(result, "goodput")
    assert told["lost_steps_s"] == 0
    assert told["cost"] == pytest.approx(told["worker_s"] / 2)


def test_rounds_of_local_steps_outlive_hosts(tmp_path: Path) -> None:
    result = train(tmp_path / "run", strategy="local-sgd:every=3", cluster=FAILING, global_batch="grow")
    assert named(result, "lost")
    require_adding_up(result)


def test_a_run_of_too_few_workers_ends(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="3 workers are left, and --elastic asks for 4 or more"):
        train(tmp_path / "run", cluster=FAILING, at_least=4, replacements=0)


@pytest.mark.slow
def test_a_plan_says_how_long_such_runs_take(tmp_path: Path) -> None:
    """Some twenty hosts are lost of each run; by chance that is less or more."""
    steps = 40 * SAMPLES / 16
    hosts = replace(CLUSTER.hosts[0], count=WORKERS, latency_us=0.0)
    cluster = replace(CLUSTER, hosts=(hosts,), compute=Compute(step_s=1.0, failures_per_hour=60.0))
    found = plan(cluster, StepWork(tensor_bytes=(160, 16), samples=4), max_workers=WORKERS, num_checks=0)
    (point,) = (each for each in found.points if each.label == "all-reduce" and each.prediction.workers == WORKERS)
    restart, elastic = failing.Survey(found).of(point)
    result = train(tmp_path / "elastic", cluster=cluster, epochs=40)
    assert len(named(result, "lost")) > 10
    assert result.training_time_s == pytest.approx(steps / elastic.goodput, rel=0.1)
    again = train(tmp_path / "restart", cluster=cluster, epochs=40, checkpoint_every=restart.every)
    assert len(named(again, "restarted")) > 10
    assert again.training_time_s == pytest.approx(steps / restart.goodput, rel=0.2)


def test_without_failures_an_elastic_run_takes_as_long_as_any(tmp_path: Path) -> None:
    result = train(tmp_path / "run", cluster=replace(FAILING, compute=replace(FAILING.compute, failures_per_hour=1e-9)))
    assert result.training_time_s == pytest.approx(EPOCHS * SAMPLES / 16, rel=1e-3)


def test_without_elastic_a_run_begins_anew_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """Its clock shows what it did twice, and for how long there was no host; the model is the undisturbed one's."""
    undisturbed = train(tmp_path / "undisturbed", checkpoint_every=2)
    result = train(tmp_path / "run", cluster=OFTEN, checkpoint_every=2)
    restarted = named(result, "restarted")
    assert len(restarted) > 1
    assert {event["down_s"] for event in restarted} == {2.0}, "the process; a fifth host is free"
    assert all(0 < event["again_s"] <= 2 + 1 for event in restarted), "up to two steps, and a part of the third"
    lost_s = sum(event["again_s"] + event["down_s"] for event in restarted)
    assert result.training_time_s == pytest.approx(undisturbed.training_time_s + lost_s, rel=1e-3)
    torch.testing.assert_close(result.model_state(), undisturbed.model_state(), rtol=0, atol=0)
    (told,) = named(result, "goodput")
    assert told["worker_s"] == pytest.approx(WORKERS * result.training_time_s, rel=1e-3)
    assert told["goodput"] == pytest.approx(undisturbed.training_time_s / result.training_time_s, rel=1e-3)
    assert told["cost"] == pytest.approx(told["worker_s"])


def test_a_run_that_never_comes_to_the_next_checkpoint_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulating, "_MOST_TRIES", 0)
    with pytest.raises(
        RunFailed, match=r"hosts have failed 0 times before .* iteration \d+ to the next; save more often"
    ):
        train(tmp_path / "run", cluster=OFTEN, checkpoint_every=2)
