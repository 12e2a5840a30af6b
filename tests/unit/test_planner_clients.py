"""What plans say of clients' turns: worked by hand, beside the simulator, and beside runs on the virtual engine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.errors import UsageError
from paceline.planner import StepWork, plan, predict, wording
from paceline.planner.simulator import simulate
from paceline.planner.turns import NUM_ROUNDS, sizes_of
from paceline.strategies import build
from paceline.training.worker import Worker
from tests.conformance.rows import loader_of, problem
from tests.conformance.virtual_cluster import GIGABIT, run

SAMPLE_S = 0.01
SIZE = 250_000
WORK = StepWork(tensor_bytes=(4 * SIZE,), tensor_shapes=((500, 500),), samples=4, data_samples=96)


def cluster_of(*hosts: Hosts, latency_us: float = 0.0, **compute: Any) -> Cluster:
    """Alike hosts of 1 Gbit/s, behind those that are given."""
    alike = Hosts(count=12, bandwidth_gbit_per_s=1.0, latency_us=latency_us, memory_gbyte_per_s=1e6)
    return Cluster(hosts=(*hosts, alike), compute=Compute(sample_s=SAMPLE_S, **compute))


def train(worker: Worker, out: Path) -> None:
    """1 MB of parameters that are not computed with much."""
    model = nn.Linear(500, 500, bias=False)
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1e-3), loader_of(problem()))
    while True:
        for x, y, _ in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(F.pad(x, (0, 490))), y).backward()
            optimizer.step()


def test_a_round_by_hand() -> None:
    """Four workers play a client each, of eight with 12 samples. Three changes of 1 MB queue at the server's card; then
    a ring of four moves 6 quarters of 1 MB."""
    options = {"clients": 8, "fraction": 0.5, "epochs": 2}
    found = predict(cluster_of(), strategy="fed-avg", workers=4, work=WORK, options=options)
    upload_s, joint_s = 3 * 4 * SIZE / GIGABIT, 6 / 4 * 4 * SIZE / GIGABIT
    assert found.iteration_s == pytest.approx(24 * SAMPLE_S + upload_s + joint_s, rel=1e-3)
    assert found.step_s == pytest.approx(found.iteration_s / 6)
    assert found.samples_per_s == pytest.approx(4 * 24 / found.iteration_s)
    assert found.link_bytes["worker's card"] * 6 == pytest.approx((3 + 1.5) * 4 * SIZE)
    coded = predict(
        cluster_of(), strategy="fed-avg", workers=4, work=WORK, options={**options, "codec": "bf16:feedback=false"}
    )
    assert coded.link_bytes["worker's card"] * 6 == pytest.approx((3 / 2 + 1.5) * 4 * SIZE)
    assert found.iteration_s - coded.iteration_s == pytest.approx(upload_s / 2, rel=0.01)
    with_controls = predict(cluster_of(), strategy="scaffold", workers=8, work=WORK, options={**options, "fraction": 1})
    assert with_controls.link_bytes["worker's card"] * 6 == pytest.approx(2 * (7 + 2 * 7 / 8) * 4 * SIZE)


def test_a_slow_line_keeps_nobody_but_its_own_client() -> None:
    """Of two workers one has a tenth of the bandwidth, and changes of both do not wait for one another."""
    slow = Hosts(name="slow", bandwidth_gbit_per_s=0.1, latency_us=0.0, memory_gbyte_per_s=1e6)
    alike = cluster_of().hosts[0]
    cluster = replace(cluster_of(), hosts=(replace(alike, count=2), slow))
    options = {"clients": 3, "fraction": 1}
    found = predict(cluster, strategy="fed-avg", workers=3, work=WORK, options=options)
    ring_s = 4 / 3 * 4 * SIZE / (GIGABIT / 10)
    assert found.iteration_s == pytest.approx(32 * SAMPLE_S + 4 * SIZE / (GIGABIT / 10) + ring_s, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "workers", "options"),
    [
        ("fed-avg", 1, {"clients": 6, "fraction": 0.5}),
        ("fed-avg", 3, {"clients": 6, "fraction": 1}),
        pytest.param(
            "fed-avg", 4, {"clients": 12, "fraction": 0.5, "partition": "linear", "epochs": 2}, marks=pytest.mark.slow
        ),
        ("fed-avg", 3, {"clients": 12, "fraction": 0.5, "partition": "quantity", "codec": "int8", "optimizer": "kept"}),
        pytest.param(
            "fed-avg",
            3,
            {"clients": 12, "fraction": 0.5, "partition": "shards", "codec": "qsgd", "sampler": "cyclic"},
            marks=pytest.mark.slow,
        ),
        pytest.param("dp-fed-avg", 3, {"clients": 12, "fraction": 0.3}, marks=pytest.mark.slow),
        pytest.param("scaffold", 3, {"clients": 12, "fraction": 0.3}, marks=pytest.mark.slow),
    ],
)
def test_plans_come_true(name: str, workers: int, options: dict[str, Any], tmp_path: Path) -> None:
    """The very rounds that a plan takes the mean of, of which the virtual engine sends every message."""
    cluster = cluster_of(Hosts(name="half", speed=0.5, bandwidth_gbit_per_s=0.5), latency_us=200.0)
    found = predict(cluster, strategy=name, workers=workers, work=WORK, options=options)
    result = run(train, tmp_path, name, workers, cluster=cluster, options=options, max_steps=NUM_ROUNDS)
    ended_s = max(step.time_s for step in result.steps)
    assert ended_s / NUM_ROUNDS == pytest.approx(found.iteration_s, rel=0.03)
    asked = {"strategy": name, "workers": workers, "work": replace(WORK, overhead_s=0.02), "options": options}
    simulated, found = simulate(cluster, **asked, steps=NUM_ROUNDS), predict(cluster, **asked)
    assert simulated.step_s == pytest.approx(found.step_s, rel=1e-6), "nothing is left to chance"


def test_the_slowest_pays_the_overhead_of_all_its_turns() -> None:
    """Five clients of 12 samples, three steps each, on four workers: one of them plays two turns."""
    options = {"clients": 5, "fraction": 1}
    work = replace(WORK, data_samples=60)
    with_overhead, bare = (
        predict(cluster_of(), strategy="fed-avg", workers=4, work=each, options=options)
        for each in (replace(work, overhead_s=0.05), work)
    )
    assert with_overhead.iteration_s - bare.iteration_s == pytest.approx(2 * 3 * 0.05)
    parts = (with_overhead.compute_s, with_overhead.waiting_s, with_overhead.exchange_s, with_overhead.overhead_s)
    assert sum(parts) == pytest.approx(with_overhead.step_s)


def test_a_client_without_samples_takes_no_time() -> None:
    options = {"clients": 12, "fraction": 1, "partition": "quantity:least=0:alpha=0.1"}
    cluster = cluster_of(distribution="log-normal", variation=0.3)
    asked = {"strategy": "fed-avg", "workers": 3, "work": WORK, "options": options}
    assert 0 in sizes_of(build("fed-avg", options).participation(), WORK.data_samples)
    assert predict(cluster, **asked).step_s == pytest.approx(simulate(cluster, **asked, steps=200).step_s, rel=0.05)


def test_chance_makes_the_slowest_late_as_in_the_simulator() -> None:
    cluster = cluster_of(distribution="log-normal", variation=0.3)
    asked = {"strategy": "fed-avg", "workers": 8, "work": WORK, "options": {"clients": 8, "fraction": 1}}
    found, simulated = predict(cluster, **asked), simulate(cluster, **asked, steps=300)
    assert found.waiting_s > 0
    assert found.step_s == pytest.approx(simulated.step_s, rel=0.05)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("fed-avg", {"partition": "dirichlet"}, "partition=dirichlet divides samples by their values"),
        ("fed-avg", {"clients": 97}, "96 samples cannot be divided into 97 parts"),
        ("fed-avg", {"aggregate": "median"}, "gather each client's change"),
        ("fed-avg", {"reject": "validation"}, "gather each client's change"),
        ("fed-avg", {"secure": "masks", "fraction": 1}, "exchange keys and shares"),
        ("fed-bn", {}, "keep layers"),
        ("fed-buff", {}, "draws how long clients take"),
    ],
)
def test_what_nobody_can_price_is_refused_in_words(name: str, options: dict[str, Any], why: str) -> None:
    asked = partial(predict, cluster_of(), strategy=name, workers=2, options={"clients": 8, **options})
    with pytest.raises(UsageError, match=why):
        asked(work=WORK)


def test_a_plan_has_clients_where_it_knows_how_much_data_they_share() -> None:
    found = plan(cluster_of(), replace(WORK, data_samples=6000), max_workers=4, num_checks=0)
    assert {"fed-avg", "dp-fed-avg", "scaffold"} <= set(found.frame["strategy"])
    assert {point.is_ranked for point in found.points if point.label == "fed-avg"} == {True, False}, "alone it ranks"
    assert found.unpriced == ("fed-bn", "fed-buff")
    lines = [line for line in wording.answer(found) if line.startswith("Left out")]
    assert len(lines) == 2
    assert "Left out: fed-bn, which has clients keep layers" in " ".join(lines)
    unknown = plan(cluster_of(), replace(WORK, data_samples=0), max_workers=4, num_checks=0)
    assert "fed-avg" in unknown.unpriced
    assert any("nothing says how many samples they share" in line for line in wording.answer(unknown))
