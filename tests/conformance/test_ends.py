"""Every strategy ends a run for all workers alike."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.training.worker import Worker
from tests.conformance.local_engine import STOP_FILE
from tests.conformance.rows import (
    SELDOM,
    Row,
    every_row,
    every_row_but_codecs,
    keep,
    kept,
    prepared,
    short_s,
    step,
    steps_of,
    wait_until,
)


def train_for_long(worker: Worker, out: Path, *, slow_rank: int | None = None, max_epochs: int = 200) -> None:
    model, optimizer, loader = prepared(worker)
    calls = [0]

    @worker.evaluation
    def score(model: nn.Module) -> dict[str, float]:
        calls[0] += 1
        return {"score": float(calls[0])}

    for _ in range(max_epochs):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)
            if worker.rank == slow_rank:
                time.sleep(0.01)
    keep(out, f"ended-{worker.rank}", worker.iteration)


@every_row_but_codecs
def test_target_ends_the_run_for_all(row: Row, tmp_path: Path) -> None:
    result = row.run(train_for_long, tmp_path, target="score=3", eval_every=4)
    scores = [evaluation.metrics["score"] for evaluation in result.evaluations]
    assert scores[:3] == [1, 2, 3]
    assert result.time_to_target_s == result.evaluations[2].time_s
    if row.is_judged_beside:  # known at the next pause; the model that is saved is judged as well
        assert scores[3:] in ([], [4])
        assert result.evaluations[-1].iteration == result.iteration
    else:
        assert not scores[3:]
        assert 8 <= result.iteration < 12
    assert [kept(tmp_path, f"ended-{rank}") for rank in range(row.workers)] == [result.iteration] * row.workers


@every_row_but_codecs
def test_max_steps_counts_as_the_literature_does(row: Row, tmp_path: Path) -> None:
    """One a global update; where every gradient is an update, one a gradient."""
    result = row.run(train_for_long, tmp_path, max_steps=10)
    assert result.iteration == 10
    num_steps = [len(steps_of(result, worker)) for worker in range(row.workers)]
    if row.is_deterministic:
        assert num_steps == [10 * row.steps_an_iteration] * row.workers
    for server in range(row.num_servers):
        updates = [update for update in result.updates if update.server == server]
        gradients = {(update.worker, update.clock) for update in updates}
        assert len(gradients) == len(updates)
        assert {update.iteration for update in updates} == set(range(1, 11))
        contributors = 1 if not row.updates_are_joint else row.workers - int(row.drops_gradients)
        assert len(updates) == 10 * contributors or row.rounds_vary
        assert all(update.staleness >= 0 for update in updates)
    if (
        row.num_servers < 2 or row.updates_are_joint
    ) and not row.rounds_vary:  # else the last gradient may be another one at every server
        applied = [record.staleness for record in result.steps if record.staleness >= 0]
        contributors = row.workers - int(row.drops_gradients) if row.updates_are_joint else 1
        assert len(applied) == 10 * contributors * row.steps_an_iteration


@every_row_but_codecs
def test_max_time_ends_the_run_for_all(row: Row, tmp_path: Path) -> None:
    """Nothing else would end it."""
    max_time_s = short_s()
    result = row.run(partial(train_for_long, max_epochs=10**9), tmp_path, max_time_s=max_time_s)
    # Any worker's clock ends it, and clocks begin one after another: by milliseconds where cores are busy.
    assert result.training_time_s >= 0.8 * max_time_s
    if row.is_deterministic:
        assert len({len(steps_of(result, worker)) for worker in range(row.workers)}) == 1


def keep_model_after_the_loop(worker: Worker, out: Path) -> None:
    """Where nobody waits for it, rank 0 makes its last step after the others have left the loop."""
    model, optimizer, loader = prepared(worker)
    for number, (x, y, _) in enumerate(loader, start=1):
        if worker.rank == 0 and number == len(loader) and not worker.strategy.traits.is_synchronous:
            wait_until((out / "model-1.kept").exists)
        step(worker, model, optimizer, x, y)
    keep(out, f"model-{worker.rank}", model.state_dict())


@every_row
def test_what_a_worker_is_left_with_after_the_loop(row: Row, tmp_path: Path) -> None:
    """The global parameters; or, where a worker is through before another, those without the other's last gradient."""
    result = row.run(keep_model_after_the_loop, tmp_path, checkpoint_every=SELDOM)
    final = result.model_state()
    left = [kept(tmp_path, f"model-{rank}") for rank in range(row.workers)]
    is_global = [all(torch.equal(model[name], final[name]) for name in final) for model in left]
    if row.nobody_counts:  # the one that is through goes on answering the other
        assert not any(is_global)
    elif row.workers_differ:
        for name, tensor in final.items():
            torch.testing.assert_close(torch.stack([model[name] for model in left]).mean(0), tensor)
    elif row.drops_gradients:  # until it has left, the others may go on without the one that is through first
        assert any(is_global)
    elif not row.is_plain:  # workers keep parts of their own
        assert not any(is_global)
    else:
        assert is_global == ([True] * row.workers if row.updates_are_joint else [True, False])


def stop_at_step_7(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    worker.evaluation(lambda model: {"loss": 1.0})
    for _ in range(200):
        for number, (x, y, _) in enumerate(loader, 1):
            step(worker, model, optimizer, x, y)
            if number == 7 and worker.rank == 0:
                (out / STOP_FILE).touch()


@every_row
def test_word_to_stop_ends_the_run_and_saves(row: Row, tmp_path: Path) -> None:
    result = row.run(stop_at_step_7, tmp_path, checkpoint_every=5)
    num_steps = {len(steps_of(result, worker)) for worker in range(row.workers)}
    assert max(num_steps) < 100  # at most 5 or 6 between two pauses, and one step of rank 0 at least; of 1600
    if row.is_deterministic:
        assert len(num_steps) == 1
        if not row.is_local:  # where steps do not tell, workers agree in the next pause
            assert num_steps == ({10} if row.workers_differ else {8})
    checkpoint = Checkpoint.decode((tmp_path / FILE_NAME).read_bytes(), where="")
    assert checkpoint.iteration == result.iteration
    assert not result.evaluations


@every_row_but_codecs
def test_a_worker_that_is_done_early_takes_part_in_the_others_pauses(row: Row, tmp_path: Path) -> None:
    """Where workers do not wait for each other, the last one pauses alone many times."""
    script = _slow_last
    result = row.run(script, tmp_path, eval_every=3, checkpoint_every=4)
    assert all(kept(tmp_path, f"ended-{rank}") for rank in range(row.workers))
    assert len(result.evaluations) >= (2 if row.is_judged_beside else result.iteration // 3)


def _slow_last(worker: Worker, out: Path) -> None:
    train_for_long(worker, out, slow_rank=worker.size - 1, max_epochs=2)


def step_after_the_end(worker: Worker, out: Path) -> None:
    """One batch over and over: the loader cannot end this loop."""
    model, optimizer, loader = prepared(worker)
    x, y, _ = next(iter(loader))
    for _ in range(100):
        step(worker, model, optimizer, x, y)
    keep(out, f"never-{worker.rank}", True)


@every_row_but_codecs
def test_script_that_goes_on_stepping_is_ended(row: Row, tmp_path: Path) -> None:
    if row.turns > 1:
        pytest.skip("a client's turn lasts as long as the script asks for no other pass")
    result = row.run(step_after_the_end, tmp_path, max_steps=10, checkpoint_every=3)
    assert result.iteration == 10
    assert not list(tmp_path.glob("never-*"))
    saved_at = [event.iteration for event in result.events if event.name == "checkpoint"]
    assert saved_at == [3, 6, 9, 10] or (not row.updates_are_joint and [at // 3 for at in saved_at[:3]] == [1, 2, 3])
