"""Every strategy evaluates and saves the global model, and training goes on as if it had not."""

from __future__ import annotations

import math
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from paceline.training.worker import Worker
from tests.conformance.rows import (
    Row,
    checksum,
    every_row,
    flat,
    keep,
    kept,
    loader_of,
    network,
    problem,
    step,
)

EVALUATION_S = 0.3
"""At least: each takes twice as long as what was trained before it, however busy the machine is."""


def evaluate(worker: Worker, out: Path, *, registers_on_all: bool = True, takes_s: float = 0.0) -> None:
    model = nn.Sequential(network(), nn.BatchNorm1d(4), nn.Dropout(0.3))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.05), loader_of(problem()))
    if registers_on_all or worker.rank == 0:
        ended_s = [math.inf]  # the evaluation before
        worker.evaluation(lambda given: look_at(worker, given, model, takes_s, ended_s))
    for _ in range(20):
        for x, y, _ in loader:
            assert model.training
            step(worker, model, optimizer, x, y)
    keep(out, f"metrics-{worker.rank}", worker.metrics)
    keep(out, f"mean-{worker.rank}", model.get_buffer("1.running_mean"))


def look_at(
    worker: Worker, given: nn.Module, model: nn.Module, takes_s: float, ended_s: list[float]
) -> dict[str, float]:
    assert worker.rank == 0
    assert given is model
    assert not any(module.training for module in given.modules())
    assert not torch.is_grad_enabled()
    torch.rand(7)
    if takes_s:
        time.sleep(max(takes_s, 2 * (time.perf_counter() - ended_s[0])))
        ended_s[0] = time.perf_counter()
    return {"checksum": checksum(given.state_dict()), "mean": float(given.get_buffer("1.running_mean").sum())}


@every_row
@pytest.mark.parametrize("registers_on_all", [True, False])
def test_evaluation_sees_the_global_model_and_leaves_no_trace(row: Row, registers_on_all: bool, tmp_path: Path) -> None:
    takes_s = EVALUATION_S if registers_on_all else 0.0
    script = partial(evaluate, registers_on_all=registers_on_all, takes_s=takes_s)
    result = row.run(script, tmp_path / "with", max_steps=20, eval_every=5)
    iterations = [evaluation.iteration for evaluation in result.evaluations]
    if row.is_judged_beside:
        assert iterations == sorted(set(iterations))
        assert {0, 20} <= set(iterations)
    else:
        assert [iteration // 5 for iteration in iterations] == [0, 1, 2, 3, 4]
    if row.updates_are_joint:
        assert iterations == [0, 5, 10, 15, 20]
    state = result.model_state()
    assert result.metrics["checksum"] == checksum(state)
    assert result.metrics["mean"] == pytest.approx(float(state["1.running_mean"].sum()), abs=1e-7)
    if not row.trains_apart:  # else statistics are the mean model's own
        means = [kept(tmp_path / "with", f"mean-{rank}") for rank in range(row.workers)]
        torch.testing.assert_close(state["1.running_mean"], torch.stack(means).mean(dim=0))
    known = [evaluation.metrics for evaluation in result.evaluations]
    for rank in range(row.workers):  # where workers count, the last evaluation comes after the script
        before_the_last = known[:-1] if row.is_judged_beside else known[-2:] if row.nobody_counts else known[-2:-1]
        assert kept(tmp_path / "with", f"metrics-{rank}") in before_the_last
    assert all(evaluation.duration_s >= 0.999 * takes_s for evaluation in result.evaluations)
    if takes_s and not row.is_judged_beside:
        pairs = [*pairwise(result.evaluations)][1:]
        # Between two there would be the first one's time if pauses were on the clock.
        assert any(later.time_s - earlier.time_s < earlier.duration_s for earlier, later in pairs)
    if row.is_deterministic and registers_on_all:
        without = row.run(evaluate, tmp_path / "without", max_steps=20)
        assert checksum(without.model_state()) == checksum(state)


class Tally(nn.Module):
    """Every gradient is -1, so with a learning rate of 1 the parameters say how many updates they have had."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(100))
        self.more = nn.Parameter(torch.zeros(100))

    def forward(self) -> Tensor:
        return -self.values.sum() - self.more.sum()


def tally(worker: Worker, out: Path) -> None:
    model = Tally()
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1.0), loader_of(problem()))
    worker.evaluation(lambda model: {"least": float(flat(model).min()), "most": float(flat(model).max())})
    for _ in range(20):
        for _ in loader:
            optimizer.zero_grad()
            model().backward()
            if worker.rank:
                time.sleep(0.002)
            optimizer.step()


@every_row
def test_evaluated_and_saved_model_is_the_one_of_its_iteration(row: Row, tmp_path: Path) -> None:
    result = row.run(tally, tmp_path, max_steps=30, eval_every=4)
    assert len(result.evaluations) == 9 or (row.is_judged_beside and len(result.evaluations) <= 9)
    saved = torch.cat([*result.model_state().values()])
    assert result.metrics == {"least": float(saved.min()), "most": float(saved.max())}
    if not (row.is_plain and row.is_exact):
        return
    for evaluation in result.evaluations:
        num_steps = evaluation.iteration * row.steps_an_iteration
        # Beside training, another worker's update may have come to some of several servers.
        behind = row.workers - 1 if row.is_judged_beside and row.options.get("servers", 1) > 1 else 0
        assert num_steps - behind <= evaluation.metrics["least"] <= evaluation.metrics["most"] <= num_steps + behind
    assert saved.tolist() == [30.0 * row.steps_an_iteration] * 200
