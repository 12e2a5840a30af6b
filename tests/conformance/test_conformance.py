"""What every strategy promises to every script: prepare, steps, gradients that are not finite, records."""

from __future__ import annotations

import math
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from paceline.errors import RunFailed
from paceline.training.worker import Worker
from tests.conformance.rows import (
    BATCH_SIZE,
    NUM_SAMPLES,
    ROWS,
    SELDOM,
    Row,
    every_row,
    every_row_but_codecs,
    flat,
    keep,
    kept,
    loader_of,
    network,
    prepared,
    problem,
    require_through,
    step,
    steps_of,
    train,
    wait_until,
)

# --- prepare -------------------------------------------------------------------------------------------------------


def prepare_unlike(worker: Worker, out: Path) -> None:
    torch.manual_seed(100 + worker.rank)
    norm = nn.BatchNorm1d(4)
    norm.register_buffer("running_mean", torch.full((4,), worker.rank + 1.0))
    model = nn.Sequential(network(), norm)
    optimizer = SGD(model.parameters(), lr=0.1)
    before = flat(model).clone()
    new_model, new_optimizer, loader = worker.prepare(model, optimizer, loader_of(problem()))
    assert new_model is model
    assert new_optimizer is optimizer
    assert isinstance(optimizer, Optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    everyone = worker.all_gather(flat(model))
    assert all(torch.equal(other, everyone[0]) for other in everyone)
    assert torch.equal(everyone[0], worker.broadcast(before))
    assert float(norm.get_buffer("running_mean")[0]) == 1.0
    draws = worker.all_gather(torch.rand(1))
    assert len({float(draw) for draw in draws}) == worker.size
    keep(out, f"indices-{worker.rank}", torch.cat([indices for _, _, indices in loader]))


@every_row_but_codecs
def test_prepare_starts_all_from_rank_0_and_divides_the_data(row: Row, tmp_path: Path) -> None:
    row.run(prepare_unlike, tmp_path)
    indices = torch.cat([kept(tmp_path, f"indices-{rank}") for rank in range(row.workers)])
    assert sorted(indices.tolist()) == list(range(NUM_SAMPLES))


# --- steps ---------------------------------------------------------------------------------------------------------


@every_row
def test_loss_falls_and_every_number_is_logged(row: Row, tmp_path: Path) -> None:
    result = row.run(train, tmp_path)
    steps_a_worker = 4 * NUM_SAMPLES // BATCH_SIZE // row.workers
    for worker in range(row.workers):
        logged = [record for record in result.logged if record.worker == worker]
        assert [record.step for record in logged] == list(range(1, len(logged) + 1))
        assert {record.name for record in logged} == {"loss"}
    require_through(row, [len(steps_of(result, worker)) for worker in range(row.workers)], steps_a_worker)
    early = [record.value for record in result.logged if record.step <= 4]
    late = [record.value for record in result.logged if record.step > steps_a_worker - 4]
    assert sum(late) / len(late) < 0.8 * sum(early) / len(early)


def clip(worker: Worker, out: Path) -> None:
    model = network()
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1.0), loader_of(problem()))
    before = flat(model).clone()
    for x, y, _ in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    keep(out, f"before-{worker.rank}", before)


@every_row
def test_clipped_gradients_are_what_is_applied(row: Row, tmp_path: Path) -> None:
    """Every update moves the parameters by at most the clipped norm, and all in one direction by about that."""
    result = row.run(clip, tmp_path, changes_gradients=True)
    after = network()
    after.load_state_dict(result.model_state())
    moved = float((flat(after) - kept(tmp_path, "before-0")).norm())
    furthest = 0.01 * result.iteration * row.steps_an_iteration / (row.workers if row.nobody_counts else 1)
    assert 0.2 * furthest < moved
    assert moved <= 1.001 * furthest or not (row.is_plain and row.keeps_sizes)


def accumulate(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for number, (x, y, _) in enumerate(loader, 1):
        if number % 4:
            with worker.no_sync():
                F.cross_entropy(model(x), y).backward()
        else:
            F.cross_entropy(model(x), y).backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            assert gradient.abs().sum() > 0
            optimizer.step()
            optimizer.zero_grad()


@every_row
def test_accumulation_makes_one_step_of_several_batches(row: Row, tmp_path: Path) -> None:
    result = row.run(accumulate, tmp_path)
    num_steps = NUM_SAMPLES // BATCH_SIZE // row.workers // 4
    require_through(row, [len(steps_of(result, worker)) for worker in range(row.workers)], num_steps)
    assert {record.samples for record in result.steps} == {4 * BATCH_SIZE}


def accumulate_in_nested_blocks(worker: Worker, out: Path) -> None:
    model, _, loader = prepared(worker)
    x, y, _ = next(iter(loader))
    own = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    with worker.no_sync():
        with worker.no_sync():
            F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [2 * gradient for gradient in own])


@every_row
def test_nothing_is_exchanged_until_the_outermost_no_sync_ends(row: Row, tmp_path: Path) -> None:
    row.run(accumulate_in_nested_blocks, tmp_path)


def schedule(worker: Worker, out: Path, *, num_steps: int) -> None:
    """The learning rate becomes 0 after so many of each worker's steps."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = worker.prepare(model, optimizer, loader_of(problem()))
    scheduler = StepLR(optimizer, step_size=num_steps, gamma=0.0)
    worker.evaluation(lambda model: {"sum": float(flat(model).double().sum())})
    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)
        scheduler.step()


@every_row
def test_schedule_reaches_the_update(row: Row, tmp_path: Path) -> None:
    result = row.run(partial(schedule, num_steps=3 * row.steps_an_iteration), tmp_path, eval_every=1)
    sums = [evaluation.metrics["sum"] for evaluation in result.evaluations]
    assert len({*sums[:3]}) == 3
    if row.is_plain and not row.has_debts and row.is_deterministic:  # else momentum, or another worker, goes on
        assert sums[-1] == pytest.approx(sums[3], rel=1e-6)


def freeze_by_group(worker: Worker, out: Path) -> None:
    model = network()
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}]
    model, optimizer, loader = worker.prepare(model, SGD(groups, lr=0.1), loader_of(problem()))
    keep(out, f"before-{worker.rank}", model.state_dict())
    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)


@every_row
def test_groups_keep_their_settings(row: Row, tmp_path: Path) -> None:
    after = row.run(freeze_by_group, tmp_path).model_state()
    before = kept(tmp_path, "before-0")
    torch.testing.assert_close(after["2.weight"], before["2.weight"])
    assert not torch.allclose(after["0.weight"], before["0.weight"])


# --- gradients that are not finite ---------------------------------------------------------------------------------


def overflow(worker: Worker, out: Path, *, name: str = "2.bias") -> None:
    """The last worker's third gradient is NaN in one parameter; the others do not end the run before that."""
    model, optimizer, loader = prepared(worker)
    is_last = worker.rank == worker.size - 1
    for number, (x, y, _) in enumerate(loader, 1):
        loss = F.cross_entropy(model(x), y)
        if number == 3 and is_last:
            loss = loss + model.get_parameter(name).sum() * torch.nan
        last_has_begun = out / f"last-has-begun-{number}"
        if is_last:
            last_has_begun.touch()
        elif number <= 3:
            wait_until(last_has_begun.exists)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@every_row
def test_non_finite_gradient_raises(row: Row, tmp_path: Path) -> None:
    last = row.workers - 1
    with pytest.raises(RunFailed, match=rf"the gradient of parameter '2\.bias' on rank {last} is not finite"):
        row.run(overflow, tmp_path, checkpoint_every=SELDOM)


@every_row
def test_non_finite_gradient_is_skipped(row: Row, tmp_path: Path) -> None:
    result = row.run(overflow, tmp_path, options={"nonfinite": "skip"}, checkpoint_every=SELDOM)
    assert all(tensor.isfinite().all() for tensor in result.model_state().values())
    applied = [record.staleness >= 0 for record in result.steps]
    if not row.drops_gradients:  # one worker's gradient is enough to void an update that is made of all
        num_void = row.workers if row.updates_are_joint and not (row.is_local or row.workers_differ) else 1
        assert applied.count(False) == num_void, "what was not applied has no staleness"
    num_steps = NUM_SAMPLES // BATCH_SIZE // row.workers
    if row.is_local and not row.rounds_vary:
        assert result.iteration == num_steps // row.steps_an_iteration
    elif row.is_deterministic:
        assert result.iteration == num_steps - (not row.workers_differ)
    if not row.updates_are_joint:
        assert result.iteration == num_steps * row.workers - 1


@pytest.mark.parametrize("name", ["2.bias", "0.weight"])
def test_one_bucket_that_is_not_finite_voids_all(name: str, tmp_path: Path) -> None:
    """Each parameter has a bucket of its own: this one's is the first, or the last, of the step."""
    row = next(row for row in ROWS if row.name == "all-reduce")
    options = {"nonfinite": "skip", "bucket_mb": 1e-5}
    result = row.run(partial(overflow, name=name), tmp_path, options=options)
    assert all(tensor.isfinite().all() for tensor in result.model_state().values())
    assert result.iteration == NUM_SAMPLES // BATCH_SIZE // row.workers - 1


@every_row
def test_non_finite_gradient_is_allowed(row: Row, tmp_path: Path) -> None:
    if row.drops_gradients:
        pytest.skip("whether the gradient is among those that count is up to timing")
    if row.options.get("codec") == "sign":
        pytest.skip("only signs travel, which are numbers")
    result = row.run(overflow, tmp_path, options={"nonfinite": "allow"}, checkpoint_every=SELDOM)
    assert result.model_state()["2.bias"].isnan().all()


# --- records -------------------------------------------------------------------------------------------------------


def train_with_pauses(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    worker.evaluation(lambda model: {"zero": time.sleep(0.05) or 0.0})  # type: ignore[func-returns-value]
    for _ in range(2):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)
            time.sleep(0.004)  # after the step: it belongs to the next one
            if worker.rank == worker.size - 1:
                time.sleep(0.02)


@every_row
def test_records_are_complete_and_add_up(row: Row, tmp_path: Path) -> None:
    result = row.run(train_with_pauses, tmp_path, eval_every=5)
    num_steps = 2 * NUM_SAMPLES // BATCH_SIZE // row.workers
    for worker in range(row.workers):
        steps = steps_of(result, worker)
        assert [record.step for record in steps] == list(range(1, len(steps) + 1))
        assert sum(record.samples for record in steps) == len(steps) * BATCH_SIZE
        before_s = 0.0
        for record in steps:
            parts_s = record.compute_s + record.communication_s + record.waiting_s
            assert parts_s == pytest.approx(record.time_s - before_s, abs=1e-5)
            before_s = record.time_s
        assert sum(record.compute_s for record in steps) > 0.004 * (len(steps) - 1)
        iterations = [record.iteration for record in steps]
        assert iterations == sorted(iterations)
        if row.workers > 1 and row.moves_every_step:
            assert sum(record.moved_bytes > 0 for record in steps) >= len(steps) // row.steps_an_iteration
    assert sum(result.shares.values()) == pytest.approx(1)
    require_through(row, [len(steps_of(result, worker)) for worker in range(row.workers)], num_steps)
    assert result.samples == sum(record.samples for record in result.steps)
    if row.updates_are_joint and row.workers > 1 and not (row.drops_gradients or row.rounds_vary):
        first, slowest = steps_of(result, 0), steps_of(result, row.workers - 1)
        assert sum(record.waiting_s for record in first) > 0
        # A busy machine may delay the first worker's own computing as well, and what it sends.
        ahead_s = sum(record.compute_s for record in slowest) - sum(record.compute_s for record in first)
        exchanged_s = sum(record.waiting_s + record.communication_s for record in first)
        assert exchanged_s > min(0.005 * num_steps, ahead_s / 2)
    if row.num_servers:
        clocks = [(update.worker, update.clock) for update in result.updates if update.server == 0]
        applied = Counter(record.worker for record in result.steps if record.staleness >= 0)
        pushed = sum(math.ceil(count / row.steps_an_iteration) for count in applied.values())
        assert len(clocks) == len(set(clocks)) == pushed


def train_and_leave_late(worker: Worker, out: Path) -> None:
    """The others come to their end while the last one has yet to say that it leaves."""
    train(worker, out)
    if worker.rank == worker.size - 1:
        synchronizer = worker._session.run.prepared.synchronizer
        leave = synchronizer.leave
        synchronizer.leave = lambda: time.sleep(0.2) or leave()  # type: ignore[method-assign,func-returns-value]


def test_what_a_worker_waits_for_when_it_has_ended_belongs_to_no_step(tmp_path: Path) -> None:
    """Where a step is recorded late, since an exchange may belong to it."""
    row = next(row for row in ROWS if row.name == "fed-avg")
    steps = steps_of(row.run(train_and_leave_late, tmp_path), 0)
    before, last = steps[-2:]
    parts_s = last.compute_s + last.communication_s + last.waiting_s
    assert parts_s == pytest.approx(last.time_s - before.time_s, abs=1e-5)


def evaluate_badly(worker: Worker, out: Path, *, returned: Any = None) -> None:
    model, optimizer, loader = prepared(worker)
    worker.evaluation(lambda model: returned)
    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)


@every_row_but_codecs
def test_unknown_target_metric_is_an_error_at_once(row: Row, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="unknown target metric 'acuracy'; did you mean 'accuracy'"):
        row.run(_evaluate_accuracy, tmp_path, target="acuracy=0.5")


def _evaluate_accuracy(worker: Worker, out: Path) -> None:
    evaluate_badly(worker, out, returned={"accuracy": 0.1})
