"""Plans where hosts share cores: workers take turns, beside draws one by one and the virtual engine."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cluster.description import Cluster, Communication, Compute, Hosts, Servers
from paceline.planner import StepWork, predict
from paceline.planner.computing import Computing
from paceline.planner.core_turns import last_of_some_s
from paceline.planner.draws import Draws
from paceline.planner.setting import Setting
from paceline.planner.simulator import simulate
from tests.conformance.test_virtual_costs import step_s
from tests.conformance.virtual_cluster import PLAIN, run, tiny

STEP_S = 0.004
TRACE = (*[0.003] * 9, 0.013)
SMALL = StepWork(tensor_bytes=(160, 16), tensor_shapes=((4, 10), (4,)), samples=4)
SPREADS: dict[str, tuple[dict[str, Any], Callable[[random.Random], float]]] = {
    "trace": ({"distribution": "trace", "trace_s": TRACE}, lambda chance: chance.choice(TRACE)),
    "exponential": ({"distribution": "exponential"}, lambda chance: chance.expovariate(1 / STEP_S)),
}


def cluster_of(hosts: int = 8, cores: int = 2, **compute: Any) -> Cluster:
    kind = Hosts(count=hosts, bandwidth_gbit_per_s=1000.0, latency_us=0.01, memory_gbyte_per_s=1e6)
    return Cluster(hosts=(kind,), compute=Compute(step_s=STEP_S, **compute), shared_cores=cores)


def drawn_s(draw: Callable[[random.Random], float], *, every: int, rest_s: float, num_rounds: int = 3000) -> float:
    """Eight workers on two cores, each at the core that it comes to first and first served: one event at a time."""
    chance, rounds_s = random.Random(1), []
    for _ in range(num_rounds):
        ends_s = []
        for _ in range(2):
            ready, free_s = [(0.0, worker, 0) for worker in range(4)], 0.0
            while ready:
                ready.sort()
                came_s, worker, step = ready.pop(0)
                free_s = max(free_s, came_s) + draw(chance)
                if step + 1 < every:
                    ready.append((free_s + rest_s, worker, step + 1))
                else:
                    ends_s.append(free_s)
        rounds_s.append(max(ends_s))
    return statistics.fmean(rounds_s)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("every", "rest_s"), [(1, 0.0), (1, 0.02), (5, 0.0), (8, 0.02)])
def test_workers_of_a_core_take_the_sum_of_their_draws(spread: str, every: int, rest_s: float) -> None:
    """Not the slowest draw four times; and in rounds, where they rest at different times, hardly more than theirs."""
    compute, draw = SPREADS[spread]
    work, options = replace(SMALL, overhead_s=rest_s), {"every": every}
    found = predict(cluster_of(**compute), strategy="local-sgd", workers=8, work=work, options=options)
    round_s = every * (found.step_s - found.exchange_s) - rest_s
    rounds = 300 if every > 1 else 3000
    assert round_s == pytest.approx(drawn_s(draw, every=every, rest_s=rest_s, num_rounds=rounds), rel=0.03)


@pytest.mark.parametrize("every", [1, 6])
def test_the_simulator_takes_turns_as_well(every: int) -> None:
    compute, _ = SPREADS["exponential"]
    given: dict[str, Any] = {"strategy": "local-sgd", "workers": 8, "options": {"every": every}}
    given |= {"work": replace(SMALL, overhead_s=0.01)}
    found = predict(cluster_of(**compute), **given)
    assert simulate(cluster_of(**compute), **given, steps=300).step_s == pytest.approx(found.step_s, rel=0.06)


@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd"])
def test_the_virtual_engine_takes_as_long(strategy: str, tmp_path: Path) -> None:
    compute, _ = SPREADS["exponential"]
    cluster, options = cluster_of(4, **compute), {"every": 5} if strategy == "local-sgd" else {}
    found = predict(cluster, strategy=strategy, workers=4, work=SMALL, options=options)
    result = run(tiny, tmp_path, strategy, 4, cluster=cluster, options=options, max_steps=60)
    assert step_s(result) == pytest.approx(found.step_s, rel=0.12)


@pytest.mark.parametrize(("hosts", "cores", "speeds"), [(9, 8, (1.0,)), (16, 8, (1.0, 0.25)), (3, 2, (1.0,))])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("gossip", {}),
        ("gossip", {"topology": "ring"}),
        ("gossip", {"order": "awc"}),
        ("local-sgd", {"every": 100}),
    ],
    ids=str,
)
def test_all_wait_for_whose_core_has_most_to_do(
    hosts: int, cores: int, speeds: tuple[float, ...], strategy: str, options: dict[str, Any]
) -> None:
    """However few neighbours each has, and however seldom they meet."""
    (kind,) = cluster_of(hosts).hosts
    count = hosts // len(speeds)
    kinds = tuple(replace(kind, name=f"speed-{speed:g}", count=count, speed=speed) for speed in speeds)
    cluster = Cluster(hosts=kinds, compute=Compute(step_s=0.1), shared_cores=cores)
    given: dict[str, Any] = {"strategy": strategy, "workers": hosts, "work": SMALL, "options": options}
    found = predict(cluster, **given).step_s
    assert found == pytest.approx(0.5 if len(speeds) > 1 else 0.2, rel=0.01)
    assert simulate(cluster, **given, steps=200).step_s == pytest.approx(found, rel=0.01)


def test_the_last_of_some_workers_is_the_mean_over_all_sets() -> None:
    ends_s = np.random.default_rng(0).exponential(size=(3, 6))
    for size, left_out in ((1, 0), (3, 0), (3, 1), (6, 2)):
        last = [[sorted(row[list(some)])[-1 - left_out] for some in combinations(range(6), size)] for row in ends_s]
        assert last_of_some_s(ends_s, size, left_out=left_out) == pytest.approx(np.mean(last))


def test_cores_of_their_own_change_nothing() -> None:
    """As many cores as hosts are as good as cores that nobody shares."""
    compute, _ = SPREADS["exponential"]
    for strategy in ("all-reduce", "local-sgd", "gossip", "ps-bsp"):
        shared, own = (
            predict(cluster, strategy=strategy, workers=4, work=SMALL)
            for cluster in (cluster_of(8, 8, **compute), replace(cluster_of(8, 8, **compute), shared_cores=None))
        )
        assert shared.step_s == own.step_s


@pytest.mark.parametrize(
    ("strategy", "options", "taken_s"),
    [
        ("ps-bsp", {}, 0.5),
        ("ps-ssp", {"staleness": 3}, 0.5),
        ("ps-asp", {}, 0.32),
        ("ps-bsp", {"backup_workers": 1}, 0.5),
    ],
    ids=str,
)
def test_unlike_hosts_of_a_core_slow_each_other_down_under_servers(
    strategy: str, options: dict[str, Any], taken_s: float, tmp_path: Path
) -> None:
    """On each of four cores one host needs 0.1 s for a step, and one 0.4 s. Where all wait for all, they are through
    after 0.5 s; else each has half of its core: 5 and 1.25 steps a second."""
    (kind,) = cluster_of(4).hosts
    kinds = tuple(replace(kind, name=f"speed-{speed:g}", speed=speed) for speed in (1.0, 0.25))
    beside = Servers(placement="with workers")
    cluster = Cluster(hosts=kinds, compute=Compute(step_s=0.1), servers=beside, shared_cores=4)
    given: dict[str, Any] = {"strategy": strategy, "workers": 8, "work": SMALL, "options": options}
    assert predict(cluster, **given).step_s == pytest.approx(taken_s, rel=0.01)
    assert simulate(cluster, **given, steps=60).step_s == pytest.approx(taken_s, rel=0.02)
    own = options | (PLAIN if strategy == "ps-bsp" else {})
    is_lock_step = strategy == "ps-bsp"
    result = run(tiny, tmp_path, strategy, 8, cluster=cluster, options=own, max_steps=20 if is_lock_step else 200)
    ends = sorted(step.time_s for step in result.steps)[50:]
    measured_s = step_s(result) if is_lock_step else 8 * (ends[-1] - ends[0]) / (len(ends) - 1)
    assert measured_s == pytest.approx(taken_s, rel=0.04)


@pytest.mark.parametrize(("num_steps", "rest_s"), [(1, 0.0), (2, 0.0), (3, 0.5)])
def test_workers_of_a_core_compute_at_the_same_time(num_steps: int, rest_s: float) -> None:
    """One needs 1 s a step, the other 3 s, and they begin together. While one rests, the other has the core alone."""
    (kind,) = cluster_of(1).hosts
    kinds = tuple(replace(kind, name=f"speed-{speed:g}", speed=speed) for speed in (1.0, 1 / 3))
    work = replace(SMALL, overhead_s=rest_s)
    shared = Cluster(hosts=kinds, compute=Compute(step_s=1.0), shared_cores=1)
    setting = Setting.of(shared, work, num_workers=2, num_servers=0)
    computing, ends_s = Computing(setting, Draws(setting, seed=0)), dict[int, float]()
    for worker in range(2):
        computing.begin(worker, 10.0, num_steps=num_steps)
    while len(ends_s) < 2:
        computed = computing.go_on()
        if computed is not None:
            ends_s[computed.worker] = computed.at_s - 10.0
    # With rests one is at work from 0.5 to 2.5, 3 to 5 and 5.5 to 7 s, the other from 0.5 to 5.5, 6 to 9.5, 10 to 13.
    assert ends_s == pytest.approx({0: 7.0, 1: 13.0} if rest_s else {0: 2.0 * num_steps, 1: 4.0 * num_steps})


@pytest.mark.parametrize("operation_us", [0.0, 3000.0])
def test_a_small_all_reduce_takes_its_hops(operation_us: float, tmp_path: Path) -> None:
    """Among four hosts six, of 2 ms each; on one core that they share, which handles four of 1 ms in each round. And
    what it takes each worker however many hops it has, one after the other on that core."""
    operation_s = operation_us * 1e-6
    costs = Communication(operation_us=operation_us, operation_core_us=operation_us, hop_us=2000.0, hop_core_us=1000.0)
    own = replace(cluster_of(4, 4), communication=costs, shared_cores=None)
    for name, cluster, taken_s in (
        ("own", own, STEP_S + operation_s + 6 * 2e-3),
        ("shared", replace(own, shared_cores=1), 4 * STEP_S + 4 * operation_s + 6 * 4e-3),
    ):
        found = predict(cluster, strategy="all-reduce", workers=4, work=SMALL)
        result = run(tiny, tmp_path / name, "all-reduce", 4, cluster=cluster, max_steps=10)
        assert found.step_s == pytest.approx(taken_s, rel=0.01)
        assert step_s(result) == pytest.approx(taken_s, rel=0.01 if name == "own" else 0.15)


def test_a_large_all_reduce_hides_its_hops() -> None:
    """What the links take is longer than a hop."""
    slow = replace(cluster_of(4, 4).hosts[0], bandwidth_gbit_per_s=0.1)
    cluster = replace(cluster_of(4, 4), hosts=(slow,))
    work = StepWork(tensor_bytes=(1_000_000,), samples=4)
    alone, hopping = (
        predict(each, strategy="all-reduce", workers=4, work=work).step_s
        for each in (cluster, replace(cluster, communication=Communication(hop_us=2000.0)))
    )
    assert hopping == pytest.approx(alone)
