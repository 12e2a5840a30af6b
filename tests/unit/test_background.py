"""A run in a thread of its own; on the virtual engine, so that nothing else has to start."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.checkpoint_files import iteration_of
from paceline.errors import RunFailed
from paceline.running.background import BackgroundRun


def train(*, fails_at: int | None = None) -> None:
    worker = paceline.init()
    x = torch.ones(16, 2)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    model = torch.nn.Linear(2, 1)
    model, optimizer, data = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    worker.evaluation(lambda model: {"weight": float(model.weight.sum())})
    steps = 0
    while not worker.is_over:
        for inputs, wanted in data:
            optimizer.zero_grad()
            (model(inputs) - wanted).square().mean().backward()
            optimizer.step()
            steps += 1
            if steps == fails_at:
                raise ValueError("as it was asked to")


def begun(directory: Path, *, checkpoint_every: int | None, fails_at: int | None = None) -> BackgroundRun:
    settings = {"max_steps": 6, "eval_every": 2, "checkpoint_every": checkpoint_every}
    virtual = {"engine": "virtual", "cluster": "lab-1gbe"}
    return BackgroundRun(partial(paceline.run, partial(train, fails_at=fails_at), **settings, **virtual), directory)


def test_evaluations_come_in_their_order_with_a_checkpoint_of_each(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", checkpoint_every=2)
    weights = []
    for iteration in (0, 2, 4, 6):
        record = run.next_evaluation()
        assert record is not None
        assert record.iteration == iteration
        weights.append(record.metrics["weight"])
        assert (iteration_of(run.checkpoint()) or 0) >= iteration
    assert len(set(weights)) == 4
    assert [run.next_evaluation(), run.next_evaluation()] == [None, None]
    run.stop()


def test_what_ends_the_run_is_raised_after_its_evaluations(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", checkpoint_every=2, fails_at=3)
    assert [run.next_evaluation().iteration for _ in range(2)] == [0, 2]
    assert iteration_of(run.checkpoint()) == 2
    with pytest.raises(RunFailed, match="as it was asked to"):
        run.next_evaluation()


def test_a_run_that_fails_before_it_saves_has_no_checkpoint(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", checkpoint_every=None, fails_at=1)
    assert run.next_evaluation() is not None
    with pytest.raises(RunFailed, match="without a checkpoint of iteration 0"):
        run.checkpoint()
