"""Predictions against closed forms, the simulator, and the virtual engine's messages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from paceline.cluster import reading as cluster_file
from paceline.cluster.description import Cluster, Compute, Hosts, Racks, Servers
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.network import patterns
from paceline.engines.virtual.network.exchange import Exchange
from paceline.engines.virtual.network.links import Network
from paceline.engines.virtual.network.wiring import Wiring
from paceline.errors import UsageError
from paceline.planner import StepWork, costs, predict
from paceline.planner.setting import Setting
from paceline.planner.simulator import ring_ends_s, simulate
from tests.conformance import virtual_cluster
from tests.conformance.rows import loader_of, problem

# Losses here have no data in them.
pytestmark = pytest.mark.filterwarnings("ignore:all . ranks compute the same gradients")

B = 125e6
STEP_S = 0.1
WORK = StepWork(tensor_bytes=(1_000_000,) * 4, samples=32)


def cluster_of(
    count: int = 40,
    *,
    gbit_per_s: float = 1.0,
    latency_us: float = 0.0,
    placement: Any = "separate",
    racks: Racks | None = None,
    memory: float = 1e6,
    workers: int | None = None,
    **compute: Any,
) -> Cluster:
    hosts = Hosts(
        count=count,
        bandwidth_gbit_per_s=gbit_per_s,
        latency_us=latency_us,
        memory_gbyte_per_s=memory,
        workers=workers,
    )
    return Cluster(
        hosts=(hosts,), racks=racks, compute=Compute(step_s=STEP_S, **compute), servers=Servers(placement=placement)
    )


def exchange_s(strategy: str, workers: int, *, cluster: Cluster | None = None, **options: Any) -> float:
    found = predict(cluster or cluster_of(), strategy=strategy, workers=workers, work=WORK, options=options)
    return found.step_s - STEP_S


# --- closed forms on alike hosts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 8, 20])
def test_on_alike_hosts_it_is_the_textbook(n: int) -> None:
    total = float(WORK.parameter_bytes)
    ring = costs.ring_s(n, total, bytes_per_s=B)
    assert exchange_s("ring", n) == pytest.approx(ring, rel=1e-3)
    assert exchange_s("all-reduce", n, algorithm="all-to-all") == pytest.approx(ring, rel=1e-3)
    assert exchange_s("all-reduce", n, algorithm="naive-ring") == pytest.approx((n - 1) * total / B, rel=1e-3)
    halving = costs.halving_doubling_s(n, total, bytes_per_s=B)
    assert exchange_s("all-reduce", n, algorithm="halving-doubling") == pytest.approx(halving, rel=1e-3)
    # Pieces go both ways at once, as far as workers that were answered in turns do not hold up the first of them.
    way = max(1, n / 2) * total / B  # through a worker's card, or one of two servers'
    assert way <= exchange_s("ps-bsp", n, servers=2) <= 2 * way + 0.005
    together = exchange_s("ps-bsp", n, servers=n, cluster=cluster_of(placement="with workers"))
    assert together == pytest.approx(ring, rel=0.15)


def test_only_the_last_bucket_shows_where_backward_is_long() -> None:
    """Four buckets of 1 MB between two hosts take 8 ms each, and become ready every 17 ms."""
    found = predict(cluster_of(), strategy="all-reduce", workers=2, work=WORK, options={"bucket_mb": 1.0})
    assert found.exchange_s == pytest.approx(0.008, rel=0.01)
    assert found.hidden_s == pytest.approx(0.024, rel=0.01)
    assert found.compute_s + found.waiting_s + found.exchange_s + found.overhead_s == pytest.approx(found.step_s)


def test_servers_hide_nothing_and_backup_workers_do_not_count() -> None:
    found = predict(cluster_of(), strategy="ps-bsp", workers=4, work=WORK, options={"backup_workers": 1})
    assert found.hidden_s == 0
    assert found.samples_per_s == pytest.approx(3 * WORK.samples / found.step_s)


def test_bytes_through_links_by_hand() -> None:
    """Six workers and two servers: a worker's card 4 MB each way, a server's 6 x 2 MB, in a step."""
    found = predict(cluster_of(), strategy="ps-bsp", workers=6, work=WORK, options={"servers": 2})
    assert found.link_bytes == pytest.approx({"worker's card": 4e6, "server's card": 12e6})
    assert found.resource == "a server's card"
    assert found.busiest.busy_s == pytest.approx(12e6 / B)
    # Racks of three: each holds three workers but the servers' rack, to which all 24 MB go.
    racks = Racks(hosts=3, bandwidth_gbit_per_s=1.0)
    racked = predict(cluster_of(8, racks=racks), strategy="ps-bsp", workers=6, work=WORK, options={"servers": 2})
    assert racked.link_bytes["rack's cable"] == pytest.approx(24e6)
    assert racked.resource == "a rack's cable"


def test_a_worker_sends_itself_nothing() -> None:
    """Two hosts with a slow memory: direct exchange takes 2 x 2 MB through cards, and nothing through memories."""
    slow = cluster_of(2, memory=0.01)
    found = predict(slow, strategy="all-reduce", workers=2, work=WORK, options={"algorithm": "all-to-all"})
    assert found.link_bytes == pytest.approx({"worker's card": 4e6}, rel=1e-3)
    assert found.exchange_s == pytest.approx(4e6 / B, rel=1e-3)


@pytest.mark.parametrize("name", ["commodity-10gbe", "lab-1gbe", "laptops-wifi", "published", "volunteers"])
@pytest.mark.parametrize("strategy", ["all-reduce", "ring", "ps-bsp", "ps-ssp", "ps-asp"])
def test_no_link_is_busy_for_longer_than_a_step(name: str, strategy: str) -> None:
    """On every shipped cluster: up to all of its workers, and servers."""
    cluster, work = cluster_file.load(name), replace(WORK, tensor_bytes=(10_000_000,) * 4, step_s=STEP_S)
    for workers in (1, 2, 5, min(20, cluster.num_slots)):
        for servers in (1, 2, 4) if strategy.startswith("ps-") else (0,):
            options = {"servers": servers} if servers else {}
            found = predict(cluster, strategy=strategy, workers=workers, work=work, options=options)
            assert found.busiest.busy_s <= found.step_s * (1 + 1e-9), (workers, servers)
            assert found.step_s_low <= found.step_s * (1 + 1e-9)
            assert found.step_s <= found.step_s_high * (1 + 1e-9)


def test_an_air_that_all_share_limits_asynchronous_workers() -> None:
    """40 MB there and back through 0.4 Gb/s: 1.6 s a gradient, but for the worker on the server's own host."""
    cluster = cluster_file.load("laptops-wifi")
    work = replace(WORK, tensor_bytes=(40_000_000,), step_s=STEP_S)
    given = {"strategy": "ps-asp", "workers": 19, "work": work}
    found = predict(cluster, **given)  # type: ignore[arg-type]
    assert found.resource == "the core"
    assert found.iteration_s >= 18 / 19 * 2 * 40e6 / 50e6 * (1 - 1e-9)
    assert found.step_s == pytest.approx(simulate(cluster, **given, steps=30).step_s, rel=0.1)  # type: ignore[arg-type]


def test_a_link_that_is_always_busy_binds() -> None:
    """500 KB take a server's card 4 ms: 25 workers that compute for 100 ms fill it, though each exchanges little."""
    work = replace(WORK, tensor_bytes=(500_000,))
    one, many = (predict(cluster_of(), strategy="ps-asp", workers=workers, work=work) for workers in (1, 32))
    assert one.binding == "computing"
    assert many.compute_s > 2 * many.exchange_s
    assert many.binding == "a server's card"


def test_efficiency_and_iterations() -> None:
    work = replace(WORK, overhead_s=0.02)
    one = predict(cluster_of(), strategy="single", workers=1, work=work)
    assert (one.step_s, one.efficiency) == (pytest.approx(0.12), pytest.approx(1.0))
    asynchronous = predict(cluster_of(), strategy="ps-asp", workers=4, work=work)
    assert asynchronous.iteration_s == pytest.approx(asynchronous.step_s / 4)
    assert asynchronous.global_batch == pytest.approx(work.samples)


def test_stale_synchronous_lies_between() -> None:
    cluster = cluster_of(distribution="exponential")
    bsp, ssp, asp = (
        predict(cluster, strategy=name, workers=8, work=replace(WORK, tensor_bytes=(4000,)))
        for name in ("ps-bsp", "ps-ssp", "ps-asp")
    )
    assert asp.step_s == pytest.approx(ssp.step_s_low)
    assert ssp.step_s_low < ssp.step_s < ssp.step_s_high
    assert ssp.step_s_high == pytest.approx(bsp.step_s, rel=0.01)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="did you mean 'ps-bsp'"):
        predict(cluster_of(), strategy="ps-bs", workers=2, work=WORK)
    with pytest.raises(UsageError, match=r"replicas.*measure it with"):
        predict(cluster_of(), strategy="ps-bsp", workers=2, work=WORK, options={"servers": 2, "replicas": 1})
    with pytest.raises(UsageError, match="room for 40"):
        predict(cluster_of(), strategy="all-reduce", workers=41, work=WORK)
    counted = Cluster(hosts=(Hosts(bandwidth_gbit_per_s=1.0, gflop_per_s=1.0),))
    with pytest.raises(UsageError, match="nothing says how long"):
        predict(counted, strategy="single", workers=1, work=WORK)
    with pytest.raises(UsageError, match="backward shares for 4 tensors"):
        replace(WORK, backward_shares=(1.0,))
    with pytest.raises(UsageError, match="not all 0"):
        replace(WORK, backward_shares=(0.0,) * 4)


# --- the simulator beside the closed forms ---------------------------------------------------------------------------

SYNCHRONOUS = [
    ("all-reduce", {}),
    ("all-reduce", {"bucket_mb": 1.0}),
    *(("all-reduce", {"algorithm": name}) for name in ("ring", "tree", "halving-doubling", "reduce-broadcast")),
    ("all-reduce", {"algorithm": "all-to-all"}),
    ("all-reduce", {"algorithm": "naive-ring"}),
    ("ps-bsp", {}),
    ("ps-bsp", {"servers": 3}),
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SYNCHRONOUS), st.integers(1, 16), st.sampled_from([0.1, 1.0, 25.0]), st.integers(1, 10_000_000))
def test_with_constant_times_the_simulator_agrees_to_1_percent(
    choice: tuple[str, dict[str, Any]], workers: int, gbit_per_s: float, size: int
) -> None:
    strategy, options = choice
    cluster, work = cluster_of(gbit_per_s=gbit_per_s), StepWork(tensor_bytes=(size, 1000), samples=8)
    found = predict(cluster, strategy=strategy, workers=workers, work=work, options=options)
    simulated = simulate(cluster, strategy=strategy, workers=workers, work=work, options=options, steps=10)
    assert found.step_s == pytest.approx(simulated.step_s, rel=0.01)
    assert found.samples_per_s == pytest.approx(simulated.samples_per_s, rel=0.01)


@pytest.mark.parametrize(("strategy", "tolerance"), [("all-reduce", 0.02), ("ps-bsp", 0.04), ("ps-asp", 0.06)])
@pytest.mark.parametrize("workers", [4, 12])
def test_with_log_normal_times_it_agrees_to_some_percent(strategy: str, tolerance: float, workers: int) -> None:
    cluster = cluster_of(distribution="log-normal", variation=0.2)
    found = predict(cluster, strategy=strategy, workers=workers, work=WORK)
    simulated = simulate(cluster, strategy=strategy, workers=workers, work=WORK, steps=300)
    assert found.step_s == pytest.approx(simulated.step_s, rel=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*SYNCHRONOUS[1:], ("ps-asp", {}), ("ps-ssp", {"servers": 2})]),
    st.integers(1, 12),
    st.floats(0.1, 10.0),
    st.floats(1.0, 10.0),
)
def test_more_bandwidth_is_never_slower(
    choice: tuple[str, dict[str, Any]], workers: int, gbit_per_s: float, factor: float
) -> None:
    strategy, options = choice
    slow, fast = (
        predict(cluster_of(gbit_per_s=rate), strategy=strategy, workers=workers, work=WORK, options=options)
        for rate in (gbit_per_s, gbit_per_s * factor)
    )
    assert fast.step_s <= slow.step_s * (1 + 1e-9)


# --- beside messages -------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.0, 0.5), min_size=2, max_size=16), st.floats(0.0, 5000.0), st.integers(1, 10_000_000))
def test_a_ring_as_one_sliding_maximum_is_the_ring_message_by_message(
    begin_s: list[float], latency_us: float, num_bytes: int
) -> None:
    cluster = cluster_of(len(begin_s), latency_us=latency_us)
    timeline = EventQueue()
    network = Network(timeline, Wiring(cluster))
    ends_s: dict[int, float] = {}

    def done(rank: int) -> None:
        ends_s[rank] = timeline.now_s

    size = len(begin_s)
    exchange = Exchange(network, range(size), patterns.all_reduce([[rank] for rank in range(size)], num_bytes), done)
    for rank, time_s in enumerate(begin_s):
        timeline.at(time_s, exchange.join, rank)
    timeline.run()
    setting = Setting.of(cluster, WORK, num_workers=size, num_servers=0)
    found = ring_ends_s(setting.ring, np.array(begin_s), num_bytes)
    assert found.max() == pytest.approx(max(ends_s.values()), rel=1e-6)
    assert found == pytest.approx([ends_s[rank] for rank in range(size)], rel=0.02)


def train(worker: Any, out: Path, *, num_layers: int = 4) -> None:
    """Tensors of 1 MB, each in a layer of its own."""
    model = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(num_layers)))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1e-4), loader_of(problem()))
    while True:
        for _ in loader:
            optimizer.zero_grad()
            model(model[0].weight[:2] * 0 + 1).mean().backward()
            optimizer.step()


AFTER_PAUSES = (2, 4, 8, 16)
"""Steps in which workers under servers also compare what they push: pauses come after 1, 3, 7 and 15."""


def engine_step_s(tmp_path: Path, strategy: str, workers: int, cluster: Cluster, options: dict[str, Any]) -> float:
    """From the second step on: the mean where workers go on by themselves, else the median of steps that no pause lies
    before."""
    is_asynchronous = strategy in ("ps-asp", "ps-ssp")
    steps = 5 * workers if is_asynchronous else 16
    result = virtual_cluster.run(train, tmp_path, strategy, workers, cluster=cluster, options=options, max_steps=steps)
    ends_s: dict[int, list[float]] = {}
    for record in result.steps:
        ends_s.setdefault(record.step, []).append(record.time_s)
    typical = np.mean if is_asynchronous else np.median
    took_s = {
        step: np.mean(ends_s[step]) - np.mean(ends_s[step - 1]) for step in range(2, 5 if is_asynchronous else 16)
    }
    return float(typical([took_s[step] for step in took_s if is_asynchronous or step not in AFTER_PAUSES]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers", "options", "described"),
    [
        ("all-reduce", 4, {"bucket_mb": 1.0}, {"latency_us": 100.0}),
        ("all-reduce", 5, {"algorithm": "ring"}, {}),
        ("all-reduce", 6, {"algorithm": "halving-doubling"}, {}),
        ("all-reduce", 4, {"algorithm": "all-to-all"}, {}),
        ("all-reduce", 4, {"algorithm": "naive-ring"}, {"latency_us": 100.0}),
        ("all-reduce", 8, {"algorithm": "tree"}, {"latency_us": 100.0}),
        ("all-reduce", 8, {"bucket_mb": 1.0}, {"workers": 2, "memory": 10.0}),
        ("ps-bsp", 4, {"combine": "never"}, {"latency_us": 100.0}),
        ("ps-bsp", 6, {"combine": "never", "servers": 2}, {"memory": 5.0}),
        ("ps-bsp", 4, {"combine": "never", "servers": 4}, {"placement": "with workers"}),
    ],
)
def test_the_virtual_engine_takes_as_long(
    tmp_path: Path, strategy: str, workers: int, options: dict[str, Any], described: dict[str, Any]
) -> None:
    """Real gradients, real shards, every message and chunk; constant times."""
    cluster = cluster_of(**described)
    measured_s = engine_step_s(tmp_path, strategy, workers, cluster, options)
    work = replace(WORK, samples=1)
    found = predict(cluster, strategy=strategy, workers=workers, work=work, options=options)
    assert found.step_s == pytest.approx(measured_s, rel=0.035)  # of 4 servers on workers' hosts 3.3 %


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "placement", "tolerance"), [(1, "separate", 0.02), (2, "separate", 0.02), (2, "with workers", 0.12)]
)
def test_early_workers_send_only_a_few_pieces_as_on_the_virtual_engine(
    tmp_path: Path, servers: int, placement: str, tolerance: float
) -> None:
    """What passes from when the last one has computed until all go on; others are up to seconds early."""
    num_layers, workers, num_steps = 24, 8, 6
    compute = {"distribution": "log-normal", "variation": 0.3}
    cluster = replace(cluster_of(placement=placement), compute=Compute(step_s=3.0, **compute))
    options = {"combine": "never", "servers": servers}
    script = partial(train, num_layers=num_layers)
    result = virtual_cluster.run(
        script, tmp_path, "ps-bsp", workers, cluster=cluster, options=options, max_steps=num_steps
    )
    steps = pd.DataFrame(result.steps).groupby("step")
    own_s = (steps.time_s.mean().diff() - steps.compute_s.max()).dropna()
    own_s = own_s[~own_s.index.isin(AFTER_PAUSES)]
    work = StepWork(tensor_bytes=(1_000_000,) * num_layers, samples=1)
    found = predict(cluster, strategy="ps-bsp", workers=workers, work=work, options=options)
    assert found.exchange_s + found.overhead_s == pytest.approx(own_s.mean(), rel=tolerance)


@pytest.mark.slow
def test_asynchronous_workers_on_the_virtual_engine_are_within_the_bounds(tmp_path: Path) -> None:
    measured_s = engine_step_s(tmp_path, "ps-asp", 4, cluster_of(), {})
    found = predict(cluster_of(), strategy="ps-asp", workers=4, work=replace(WORK, samples=1))
    assert found.step_s_low < measured_s < found.step_s_high
