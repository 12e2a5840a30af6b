"""Where every gradient is an update, evaluation changes nothing that it judges: nobody waits because of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import paceline
from paceline.running.result import Result
from paceline.training import kept_models
from paceline.training.worker import Worker
from tests.conformance.rows import (
    Row,
    checksum,
    flat,
    launched,
    loader_of,
    prepared,
    problem,
    step,
    steps_of,
    wait_until,
)
from tests.conformance.test_asynchrony import SELDOM, largest_lead
from tests.conformance.virtual_cluster import cluster_of, run

WORKERS, STEPS = 3, 60
ASYNCHRONOUS = pytest.mark.parametrize(
    ("strategy", "options"),
    [("ps-asp", {"servers": 2}), ("ps-ssp", {"servers": 1, "staleness": 2})],
)


class Tally(nn.Module):
    """Every gradient is -1 and the learning rate is 1, so that the parameters count the updates that they have had."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -(self.values.sum() + 0 * x.sum())


def tally(worker: Worker, out: Path) -> None:
    model = Tally()
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1.0), loader_of(problem()))
    worker.evaluation(lambda given: {"updates": float(flat(given).mean())})
    while True:
        for x, _, _ in loader:
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()


def train_and_look(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    worker.evaluation(lambda given: {"sum": float(given(torch.ones(3, 10)).sum())})
    while True:
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)


def simulated(script: Any, out: Path, strategy: str, options: dict[str, Any], **settings: Any) -> Result:
    """Step times that no two workers ever share, so that who comes first is no matter of rounding; and no pauses for
    checkpoints."""
    cluster = cluster_of(gbit_per_s=0.1, latency_us=50.0, distribution="log-normal", variation=0.3)
    settings = {"max_steps": STEPS, "checkpoint_every": SELDOM, **settings}
    return run(script, out, strategy, WORKERS, cluster=cluster, options=options, **settings)


@ASYNCHRONOUS
def test_no_cadence_changes_any_update(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit. All are judged before training and after it, and one not in between."""
    settings: dict[str, dict[str, Any]] = {
        "none": {"eval_every": 10 * STEPS},
        "each": {"eval_every": 1},
        "samples": {"eval_every": "200samples"},
        "seconds": {"eval_every": "0.05s"},
    }
    results = {
        name: simulated(train_and_look, tmp_path / name, strategy, options, **given) for name, given in settings.items()
    }
    plain = results["none"]
    assert len(plain.updates) == STEPS * options["servers"]
    assert max(update.staleness for update in plain.updates) > 0
    for name, result in results.items():
        assert result.updates == plain.updates, name
        assert result.steps == plain.steps, name
        assert checksum(result.model_state()) == checksum(plain.model_state()), name
    each = [evaluation.iteration for evaluation in results["each"].evaluations]
    assert set(each) == {0, STEPS, *(s.iteration for s in steps_of(plain, 0) if s.iteration < STEPS)}
    assert len(plain.evaluations) == 2
    assert len(results["seconds"].evaluations) > 4


def test_a_kept_model_is_the_one_of_its_iteration_and_time(tmp_path: Path) -> None:
    result = simulated(tally, tmp_path, "ps-asp", {"servers": 1}, eval_every=10)
    ended_s = {record.iteration: record.time_s for record in steps_of(result, 0)}
    judged = result.evaluations
    assert [evaluation.iteration // 10 for evaluation in judged] == list(range(STEPS // 10 + 1))
    assert all(evaluation.metrics == {"updates": evaluation.iteration} for evaluation in judged)
    for evaluation in judged[1:-1]:
        assert evaluation.time_s == pytest.approx(ended_s[evaluation.iteration], abs=1e-6)
        assert evaluation.samples == pytest.approx(evaluation.iteration * result.samples / STEPS, rel=0.2)
    (told,) = [event for event in result.events if event.name == "models_kept"]
    assert told.details == {"kept": len(judged) - 2, "left_out": 0, "took_s": 0.0}


@pytest.mark.parametrize("after", ["stop", "continue"])
def test_a_target_is_reached_at_the_time_of_the_model_that_reached_it(after: str, tmp_path: Path) -> None:
    """A run that it ends may train a little past it: until the next pause."""
    settings: dict[str, Any] = {
        "target": "updates>=50",
        "eval_every": 10,
        "max_steps": 10_000 if after == "stop" else 100,
    }
    result = simulated(tally, tmp_path, "ps-asp", {"servers": 1}, after_target=after, **settings)
    first = next(evaluation for evaluation in result.evaluations if evaluation.iteration >= 50)
    assert 50 <= first.iteration < 60
    assert result.time_to_target_s == first.time_s
    if after == "stop":
        assert first.iteration < result.iteration <= 4 * 50
        assert result.evaluations[-1].iteration == result.iteration
    else:
        assert result.iteration == 100


def test_what_memory_has_no_room_for_is_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_models, "MOST_BYTES", 1)
    result = simulated(tally, tmp_path, "ps-asp", {"servers": 1}, eval_every=10)
    (told,) = [event for event in result.events if event.name == "models_kept"]
    assert told.details["kept"] == 1
    assert told.details["left_out"] >= 3
    assert len(result.evaluations) == 3


ALONE = 10


def apart_and_judged(worker: Worker, out: Path) -> None:
    """The last worker takes its first step once rank 0, judged after each of its own, has taken ten."""
    model, optimizer, loader = prepared(worker)
    worker.evaluation(lambda given: {"sum": float(flat(given).sum())})
    for number, (x, y, _) in enumerate(loader):
        if number == ALONE and worker.rank == 0:
            (out / "far").touch()
        if number == 0 and worker.rank == 1:
            wait_until((out / "far").exists)
        step(worker, model, optimizer, x, y)


def assert_nobody_waited(result: Result) -> None:
    assert [update.worker for update in result.updates][:ALONE] == [0] * ALONE
    assert largest_lead(result, 0, 2) >= ALONE - 1  # as counted when the tenth is pushed
    judged = [evaluation.iteration for evaluation in result.evaluations]
    assert judged[:ALONE] == list(range(ALONE))
    assert judged[-1] == result.iteration == len(result.steps)


def test_real_workers_do_not_wait_for_one_another(tmp_path: Path) -> None:
    """If an evaluation had them meet, the slow one would wait in vain for the others' steps, and they for it."""
    row = Row("ps-asp", "ps-asp", 2)
    assert_nobody_waited(row.run(apart_and_judged, tmp_path, eval_every=1, checkpoint_every=SELDOM))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_here")
def test_workers_on_ray_do_not_wait_for_one_another(tmp_path: Path) -> None:
    script, settings = partial(launched, apart_and_judged, tmp_path), {"eval_every": 1, "checkpoint_every": SELDOM}
    result = paceline.run(script, strategy="ps-asp", workers=2, out=tmp_path / "run", **settings)
    assert_nobody_waited(result)
