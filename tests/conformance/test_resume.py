"""A run that goes on from a checkpoint equals one that was never interrupted."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.errors import RunFailed
from paceline.training.worker import Worker
from tests.conformance import rows
from tests.conformance.rows import (
    BATCH_SIZE,
    NUM_SAMPLES,
    ROWS,
    SELDOM,
    Row,
    every_deterministic_row,
    every_row,
    every_row_but_codecs,
    keep,
    loader_of,
    network,
    prepared,
    problem,
    step,
)

NUM_STEPS = 22
"""Past the end of an epoch after each place that a run goes on from, or past its beginning."""
ROW = {row.name: row for row in ROWS}


class Noisy(torch.utils.data.TensorDataset):
    """Augments: what a sample is depends on the random state."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, *rest = (tensor[index] for tensor in self.tensors)
        return x + 0.1 * torch.randn_like(x), *rest


def train_everything(
    worker: Worker, out: Path, *, optimizer: str = "adam", fails_at: int | None = None, num_epochs: int = 40
) -> None:
    """Momentum or Adam, two schedulers, dropout, batch norm and random augmentation."""
    model = nn.Sequential(network(), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 4))
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:2], "lr": 0.03}, {"params": parameters[2:]}]
    # The bias in front of batch norm has no gradient but rounding, which Adam would blow up with the usual epsilon.
    updater = Adam(groups, lr=0.01, eps=1e-4) if optimizer == "adam" else SGD(groups, lr=0.05, momentum=0.9)
    by_step, by_epoch, seen = CosineAnnealingLR(updater, 50), ExponentialLR(updater, 0.8), Counter()
    loader = loader_of(Noisy(*problem(72).tensors))
    model, updater, loader = worker.prepare(model, updater, loader, by_step=by_step, by_epoch=by_epoch, seen=seen)
    worker.evaluation(lambda model: {"zero": 0.0})
    for _ in range(num_epochs):
        for x, y, _ in loader:
            step(worker, model, updater, x, y)
            by_step.step()
            seen.count += 1
            worker.log(lr=updater.param_groups[0]["lr"], count=float(seen.count))
            if seen.count == fails_at:
                raise RuntimeError("scripted failure")
        by_epoch.step()
    keep(out, f"count-{worker.rank}", seen.count)


class Counter:
    """Stateful things of a script's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def checkpoint_in(directory: Path) -> Checkpoint:
    return Checkpoint.decode((directory / FILE_NAME).read_bytes(), where=str(directory))


WHOLE: dict[tuple[object, ...], Checkpoint] = {}


def whole(row: Row, out: Path, *, optimizer: str = "adam", eval_every: int | None = None) -> Checkpoint:
    """What a run that nothing interrupts ends with, the same each time: made once an engine."""
    key = (rows.local_engine.run, row.name, optimizer, eval_every)
    if key not in WHOLE:
        script = partial(train_everything, optimizer=optimizer)
        row.run(script, out / "whole", max_steps=NUM_STEPS, eval_every=eval_every)
        WHOLE[key] = checkpoint_in(out / "whole")
    return WHOLE[key]


def assert_same(actual: Checkpoint, expected: Checkpoint) -> None:
    """Bit for bit: model, optimizer, hyperparameters, every worker's random state, buffers and place in the data."""
    assert actual.iteration == expected.iteration
    assert actual.groups == expected.groups
    assert actual.extra == expected.extra
    torch.testing.assert_close(actual.model, expected.model, rtol=0, atol=0)
    torch.testing.assert_close(actual.optimizer, expected.optimizer, rtol=0, atol=0)
    for own, other in zip(actual.workers, expected.workers, strict=True):
        assert (own.steps, own.samples, own.epoch, own.num_batches_done) == (
            other.steps,
            other.samples,
            other.epoch,
            other.num_batches_done,
        )
        assert torch.equal(own.random_state["torch"], other.random_state["torch"])
        assert all(torch.equal(own.buffers[name], buffer) for name, buffer in other.buffers.items())
        assert own.own.keys() == other.own.keys()
        assert all(torch.equal(own.own[name], state) for name, state in other.own.items())


@every_deterministic_row
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("momentum", marks=pytest.mark.slow)])
def test_run_that_ended_by_its_budget_goes_on_bit_for_bit(row: Row, optimizer: str, tmp_path: Path) -> None:
    script = partial(train_everything, optimizer=optimizer)
    row.run(script, tmp_path / "begun", max_steps=13, eval_every=7)
    row.run(script, tmp_path / "resumed", max_steps=NUM_STEPS, eval_every=7, resume=tmp_path / "begun")
    assert_same(checkpoint_in(tmp_path / "resumed"), whole(row, tmp_path, optimizer=optimizer, eval_every=7))


@every_deterministic_row
@pytest.mark.parametrize("every", [9, 5], ids=["at the end of an epoch", "within an epoch"])
def test_run_that_failed_goes_on_bit_for_bit(row: Row, every: int, tmp_path: Path) -> None:
    """The last checkpoint was taken in a pause, some steps before the failure, which may lie within a round."""
    fails_at = 19 * row.steps_an_iteration - row.is_local
    script = partial(train_everything, fails_at=fails_at)
    with pytest.raises(RunFailed, match="scripted failure"):
        row.run(script, tmp_path / "begun", max_steps=NUM_STEPS, checkpoint_every=every)
    assert checkpoint_in(tmp_path / "begun").iteration in (15, 18)
    result = row.run(train_everything, tmp_path / "resumed", max_steps=NUM_STEPS, resume=tmp_path / "begun")
    assert_same(checkpoint_in(tmp_path / "resumed"), whole(row, tmp_path))
    counts = [record.value for record in result.logged if record.name == "count" and record.worker == 0]
    num_done = checkpoint_in(tmp_path / "begun").iteration * row.steps_an_iteration
    assert counts == list(range(num_done + 1, NUM_STEPS * row.steps_an_iteration + 1))


@every_row
def test_resumed_run_continues_sanely(row: Row, tmp_path: Path) -> None:
    """Also where workers are not in step: counts go on, no batch of the epoch is seen twice, learning goes on."""
    first, last = (steps // row.steps_an_iteration for steps in (24, 96))
    before = row.run(train_long, tmp_path / "begun", max_steps=first)
    begun = checkpoint_in(tmp_path / "begun")
    assert begun.iteration == first
    result = row.run(train_long, tmp_path / "resumed", max_steps=last, resume=tmp_path / "begun")
    assert result.iteration == checkpoint_in(tmp_path / "resumed").iteration == last
    for worker, state in enumerate(begun.workers):
        steps = [record.step for record in result.steps if record.worker == worker]
        assert steps[0] == state.steps + 1
    losses = [record.value for record in result.logged]
    if row.keeps_sizes:  # else steps of one length go to and fro about the optimum
        assert sum(losses[-8:]) / 8 < 0.7 * sum(record.value for record in before.logged[:4]) / 4


def train_long(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for _ in range(60):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("all-reduce", "ps-bsp-3-servers"),
        ("ps-bsp-3-servers", "ps-bsp"),
        ("ps-bsp", "ring"),
        ("ps-bsp-3-servers", "all-reduce"),
    ],
)
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("momentum", marks=pytest.mark.slow)])
def test_resume_under_another_strategy(first: str, second: str, optimizer: str, tmp_path: Path) -> None:
    script = partial(train_everything, optimizer=optimizer)
    ROW[first].run(script, tmp_path / "begun", max_steps=13)
    ROW[second].run(script, tmp_path / "resumed", max_steps=NUM_STEPS, resume=tmp_path / "begun")
    resumed, expected = checkpoint_in(tmp_path / "resumed"), whole(ROW[first], tmp_path, optimizer=optimizer)
    assert resumed.groups == expected.groups
    torch.testing.assert_close(resumed.model, expected.model, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(resumed.optimizer, expected.optimizer, rtol=1e-3, atol=1e-5)


def train_while_rank_1_is_behind(worker: Worker, out: Path) -> None:
    """Where nobody waits for it, rank 1 has taken one step when rank 0 has taken eight."""
    model, optimizer, loader = prepared(worker)
    is_ahead, own_steps = out / "is-ahead", 0
    for _ in range(3):
        for x, y, _ in loader:
            if worker.rank == 1 and own_steps == 1 and not worker.strategy.traits.lock_step:
                rows.wait_until(is_ahead.exists)
            step(worker, model, optimizer, x, y)
            own_steps += 1
            if worker.rank == 0 and own_steps == 8:
                is_ahead.touch()


@pytest.mark.parametrize("first", ["ps-asp", "ps-bsp-backup"])
@pytest.mark.parametrize("second", ["all-reduce", "ring", "ps-bsp"])
def test_workers_that_were_not_in_step_go_on_in_step(first: str, second: str, tmp_path: Path) -> None:
    """All from the place of the first, and so they end together."""
    workers = ROW[first].workers
    ROW[first].run(train_while_rank_1_is_behind, tmp_path / "begun", max_steps=10, checkpoint_every=SELDOM)
    places = [(worker.epoch, worker.num_batches_done) for worker in checkpoint_in(tmp_path / "begun").workers]
    assert len(set(places)) > 1
    row = replace(ROW[second], workers=workers)
    result = row.run(train_while_rank_1_is_behind, tmp_path / "resumed", resume=tmp_path / "begun")
    batches_an_epoch = NUM_SAMPLES // (BATCH_SIZE * workers)
    epoch, num_batches_done = max(places)
    steps = [sum(record.worker == rank for record in result.steps) for rank in range(workers)]
    assert steps == [(3 - epoch) * batches_an_epoch - num_batches_done] * workers


@every_row_but_codecs
def test_resume_of_a_finished_run_only_saves_the_model(row: Row, tmp_path: Path) -> None:
    script = partial(train_everything, num_epochs=2)
    first = row.run(script, tmp_path / "begun")
    second = row.run(script, tmp_path / "resumed", resume=tmp_path / "begun")
    assert not second.steps
    torch.testing.assert_close(second.model_state(), first.model_state(), rtol=0, atol=0)


def train_slowly_on_rank_1(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for x, y, _ in loader:
        time.sleep(0.5 * (worker.rank == 1))
        step(worker, model, optimizer, x, y)


def test_resume_of_a_finished_run_that_left_a_slow_worker_behind(tmp_path: Path) -> None:
    """The first worker through its data ended the run: what the slow one had left is not for another run to do."""
    row = ROW["ps-bsp-backup"]
    first = row.run(train_slowly_on_rank_1, tmp_path / "begun")
    assert len({worker.steps for worker in checkpoint_in(tmp_path / "begun").workers}) > 1
    second = row.run(train_slowly_on_rank_1, tmp_path / "resumed", resume=tmp_path / "begun")
    assert not second.steps
    torch.testing.assert_close(second.model_state(), first.model_state(), rtol=0, atol=0)


def other_model(worker: Worker, out: Path) -> None:
    model = nn.Sequential(network(), nn.Linear(4, 4))
    worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    ROW["ps-bsp"].run(train_long, tmp_path / "begun", max_steps=3)
    with pytest.raises(RunFailed, match="the checkpoint is of another model"):
        ROW["ps-bsp"].run(other_model, tmp_path / "resumed", resume=tmp_path / "begun")


@pytest.mark.parametrize("row", ["all-reduce", "ps-bsp"])
def test_checkpoint_of_another_optimizer_is_refused(row: str, tmp_path: Path) -> None:
    ROW[row].run(partial(train_everything, optimizer="momentum"), tmp_path / "begun", max_steps=3)
    with pytest.raises(RunFailed, match="the checkpoint is of SGD, and this run trains with Adam"):
        ROW[row].run(train_everything, tmp_path / "resumed", resume=tmp_path / "begun")


def test_checkpoint_of_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    ROW["ps-bsp"].run(train_long, tmp_path / "begun", max_steps=3)
    with pytest.raises(RunFailed, match="taken with 2 workers, this run has 1"):
        ROW["single"].run(train_long, tmp_path / "resumed", resume=tmp_path / "begun")


@every_row
def test_checkpoint_is_complete(row: Row, tmp_path: Path) -> None:
    result = row.run(partial(train_everything, optimizer="momentum"), tmp_path, max_steps=10, checkpoint_every=4)
    saved_at = [event.iteration for event in result.events if event.name == "checkpoint"]
    if row.updates_are_joint:
        assert saved_at == [4, 8, 10]
    assert [iteration // 4 for iteration in saved_at[:2]] == [1, 2]
    checkpoint = checkpoint_in(tmp_path)
    state = result.model_state()
    assert checkpoint.iteration == 10
    assert checkpoint.model.keys() == state.keys()
    assert all(torch.equal(checkpoint.model[name], tensor) for name, tensor in state.items())
    shapes = {tuple(tensor.shape) for name, tensor in state.items() if name.endswith(("weight", "bias"))}
    assert {tuple(tensor.shape) for tensor in checkpoint.optimizer.values()} == shapes
    assert len(checkpoint.optimizer) == 8
    assert len(checkpoint.groups) == 2
    assert len(checkpoint.workers) == row.workers
    assert set(checkpoint.extra) == {"by_step", "by_epoch", "seen"}
    steps = [max(record.step for record in result.steps if record.worker == worker) for worker in range(row.workers)]
    assert [worker.steps for worker in checkpoint.workers] == steps
    if not row.trains_apart:  # else statistics are the mean model's own
        means = torch.stack([worker.buffers["1.running_mean"] for worker in checkpoint.workers]).mean(dim=0)
        torch.testing.assert_close(checkpoint.model["1.running_mean"], means)
