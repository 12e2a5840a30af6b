"""Plans of scripts with `nn.Embedding(sparse=True)`: the rows that a few batches show, and what these take."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.lab.variant import Variant
from paceline.planner import StepWork, failing, plan, predict, wording
from paceline.planner.observing import observe
from paceline.planner.row_work import NUM_STEPS
from paceline.planner.simulator import simulate
from paceline.planner.weight_work import WeightWork
from tests.conformance import virtual_engine

BATCH, DIM, NUM_ROWS, NUM_BATCHES = 400, 32, 8_000, 72
ROW_BYTES, WHOLE_BYTES = 4 * DIM, 4 * DIM * NUM_ROWS
HOSTS = Hosts(count=12, bandwidth_gbit_per_s=1.0, latency_us=100.0, memory_gbyte_per_s=10.0)
CLUSTER = Cluster(hosts=(HOSTS,), compute=Compute(step_s=0.002))
"""Where workers that wait for nobody and always take as long would stay together or not, times vary."""
VARIED = replace(CLUSTER, compute=Compute(step_s=0.002, distribution="log-normal", variation=0.3))
SLOW = pytest.mark.slow
MOVE_WHOLE = {
    "all-reduce:codec=bf16": "ps-bsp:codec=bf16",
    "all-reduce:aggregate=median": "ps-bsp:aggregate=median",
    "gossip": "ps-bsp:backup_workers=1",
    "local-sgd:every=2": "ps-asp:codec=bf16",
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_ROWS, DIM, sparse=True)
        self.used_twice = nn.Embedding(10, DIM, sparse=True)
        self.last = nn.Linear(DIM, 64)

    def forward(self, keys: Tensor) -> Tensor:
        kinds = self.used_twice(keys % 10) + self.used_twice.weight.mean()
        return self.last(self.words(keys) + kinds)  # type: ignore[no-any-return]


def batches() -> Tensor:
    """Keys come by Zipf's law."""
    weights = torch.arange(1, 5000).double().reciprocal()
    generator = torch.Generator().manual_seed(1)
    return torch.multinomial(weights, BATCH * NUM_BATCHES, replacement=True, generator=generator)


def train() -> None:
    worker = paceline.init()
    model: Any = Model()
    loader: Any = DataLoader(TensorDataset(batches()), batch_size=BATCH)
    model, optimizer, loader = worker.prepare(model, torch.optim.Adagrad(model.parameters(), lr=1e-3), loader)
    for (keys,) in loader:
        optimizer.zero_grad()
        model(keys).square().mean().backward()
        optimizer.step()


@cache
def seen() -> StepWork:
    return observe(train).work


def test_rows_of_the_first_batches_are_counted() -> None:
    words, used_twice = seen().weights
    assert [words.is_dense, used_twice.is_dense] == [False, True]
    assert used_twice.rows_of(1) == used_twice.rows_of(8) == 10
    assert seen().tensor_bytes[words.index] == WHOLE_BYTES
    keys = batches().split(BATCH)[:NUM_STEPS]
    one, two = (
        np.mean([len(torch.cat(keys[at : at + num]).unique()) for at in range(NUM_STEPS - num + 1)]) for num in (1, 2)
    )
    assert [words.rows_of(1), words.rows_of(2)] == pytest.approx([one, two])
    assert words.moved_bytes(2) == pytest.approx((8 + ROW_BYTES) * two)
    assert words.updated_bytes(1) == pytest.approx(5 * ROW_BYTES * one)  # gradient, and twice the row and its state
    assert words.state_bytes == WHOLE_BYTES
    assert words.rows_of(10**6) == NUM_ROWS
    assert words.of_part(2).rows_of(1) == pytest.approx(two)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("all-reduce", 2),
        ("ps-bsp:servers=1", 2),
        ("ps-bsp:servers=2", 2),
        ("ps-asp:servers=1", 2),
        ("all-reduce", 8),
        pytest.param("ps-bsp:servers=1", 8, marks=SLOW),
        ("ps-bsp:servers=2", 8),
        pytest.param("ps-asp:servers=1", 8, marks=SLOW),
    ],
)
def test_the_virtual_engine_takes_as_long(strategy: str, workers: int, tmp_path: Path) -> None:
    chosen = Variant.parse(strategy).strategy
    cluster, num, tolerance = (CLUSTER, 8, 0.1) if chosen.traits.unit == "update" else (VARIED, 8 * workers, 0.15)
    found = predict(cluster, strategy=chosen, workers=workers, work=seen())
    result = virtual_engine.run(train, strategy=chosen, workers=workers, out=tmp_path, cluster=cluster, max_steps=num)
    ends_s: dict[int, list[float]] = {}
    for record in result.steps:
        ends_s.setdefault(record.step, []).append(record.time_s)
    took_s = [np.mean(ends_s[step]) - np.mean(ends_s[step - 1]) for step in (5, 6, 7)]
    assert found.step_s == pytest.approx(float(np.mean(took_s)), rel=tolerance)
    whole = predict(cluster, strategy=chosen, workers=workers, work=replace(seen(), weights=()))
    assert whole.step_s > 2 * found.step_s
    simulated = simulate(cluster, strategy=chosen, workers=workers, work=seen(), steps=40)
    assert simulated.step_s == pytest.approx(found.step_s, rel=tolerance)


@pytest.mark.parametrize("strategy", [*MOVE_WHOLE, *MOVE_WHOLE.values()])
def test_who_moves_the_whole_weight_is_priced_so(strategy: str) -> None:
    chosen, whole = Variant.parse(strategy).strategy, replace(seen(), weights=())
    of_rows, of_all = (predict(CLUSTER, strategy=chosen, workers=4, work=work) for work in (seen(), whole))
    assert of_rows == of_all
    plain = predict(CLUSTER, strategy="all-reduce", workers=4, work=seen())
    assert of_all.step_s > plain.step_s


def test_servers_hold_no_rows_of_half_precision() -> None:
    half = replace(seen().weights[0], update_bytes=None)
    work = replace(seen(), weights=(half,))
    for strategy, is_whole in (("ps-bsp", True), ("all-reduce", False)):
        moved = predict(CLUSTER, strategy=strategy, workers=2, work=work).link_bytes["worker's card"]
        assert (moved > WHOLE_BYTES) is is_whole


def test_an_elastic_run_is_planned_with_whole_weights() -> None:
    """Without failures what it takes longer is its step."""
    found = plan(CLUSTER, seen(), strategies=["all-reduce"], max_workers=4, num_checks=0)
    restarting, elastic = failing.Survey(found).of(found.points[-1])
    whole = predict(CLUSTER, strategy="all-reduce", workers=4, work=replace(seen(), weights=()))
    assert restarting.goodput == 1
    assert elastic.goodput == pytest.approx(found.points[-1].prediction.step_s / whole.step_s)


def test_the_answer_names_what_moves() -> None:
    found = plan(CLUSTER, seen(), strategies=["all-reduce", "ps-bsp", "gossip"], max_workers=2, num_checks=2)
    (line,) = [line for line in wording.answer(found) if line.startswith("Rows of nn.Embedding")]
    assert "the weights have 1.03 MB" in line
    assert line.endswith("rows move under all-reduce and ps-bsp, the whole weight moves under gossip.")
    assert all(abs(check.deviation) < 0.1 for check in found.checks)
    plain = replace(seen(), weights=())
    assert not any("nn.Embedding" in line for line in wording.answer(replace(found, work=plain)))


def test_rows_grow_with_batches_as_from_one_to_two() -> None:
    weight = WeightWork(index=0, num_rows=1000, row_bytes=16, touched=(100.0, 150.0))
    assert weight.of_part(2).rows_of(1) == pytest.approx(150)
    assert weight.rows_of(4) == pytest.approx(250)
    assert weight.updated_bytes(4) == 0
