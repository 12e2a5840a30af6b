"""What plans say of codecs: beside the simulator, and beside runs on the virtual engine."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.codec import Int8, OneBit, PowerSGD, RandomK, TopK
from paceline.errors import UsageError
from paceline.planner import StepWork, predict
from paceline.planner.coded import payload_bytes, shapes_of
from paceline.planner.simulator import simulate
from paceline.running.result import Result
from tests.conformance.test_codecs import large
from tests.conformance.test_virtual_costs import step_s
from tests.conformance.virtual_cluster import PLAIN, run, tiny

LARGE = StepWork(tensor_bytes=(8_000_000, 160, 16), tensor_shapes=((2_000_000,), (4, 10), (4,)), samples=4)
MATRICES = StepWork(tensor_bytes=(4 * 1000 * 1000,) * 4, samples=4)


def cluster_of(*, workers: int = 1, gbit_per_s: float = 1.0) -> Cluster:
    hosts = Hosts(count=20, workers=workers, bandwidth_gbit_per_s=gbit_per_s, memory_gbyte_per_s=100.0)
    return Cluster(hosts=(hosts,), compute=Compute(step_s=0.05))


def median_step_s(result: Result) -> float:
    own = [record.time_s for record in result.steps if record.worker == 0]
    return statistics.median(after - before for before, after in pairwise(own))


@pytest.mark.parametrize(
    ("strategy", "workers", "codec"),
    [
        ("all-reduce", 2, "one-bit"),
        ("all-reduce", 5, "int8"),
        ("all-reduce", 5, "top-k"),
        ("all-reduce", 5, "random-k"),
        ("ps-bsp", 3, "bf16"),
        ("ps-bsp", 3, "top-k"),
        ("ps-asp", 3, "int8"),
    ],
)
def test_plans_come_true(strategy: str, workers: int, codec: str, tmp_path: Path) -> None:
    cluster = cluster_of()
    options: dict[str, Any] = {"codec": codec} | (PLAIN if strategy == "ps-bsp" else {})
    found = predict(cluster, strategy=strategy, workers=workers, work=LARGE, options={"codec": codec})
    simulated = simulate(cluster, strategy=strategy, workers=workers, work=LARGE, options={"codec": codec}, steps=20)
    # Asynchronous workers drain the links when they meet for a moment, as they do in their first steps.
    max_steps = 20 * workers if strategy == "ps-asp" else 6
    result = run(large, tmp_path, strategy, workers, cluster=cluster, options=options, max_steps=max_steps)
    for taken_s in (median_step_s(result), simulated.step_s):
        assert 0.95 * found.step_s_low <= taken_s <= 1.05 * found.step_s_high


@pytest.mark.parametrize("codec", ["int8", "top-k"])
def test_flags_go_by_themselves(codec: str, tmp_path: Path) -> None:
    """On links of 100 us eight workers' flags take 14 messages, 1.4 ms, before what is coded leaves."""
    hosts = Hosts(count=8, bandwidth_gbit_per_s=1.0, latency_us=100.0)
    cluster = Cluster(hosts=(hosts,), compute=Compute(step_s=0.005))
    small = StepWork(tensor_bytes=(160, 16), tensor_shapes=((4, 10), (4,)), samples=4)
    given: dict[str, Any] = {"strategy": "all-reduce", "workers": 8, "work": small, "options": {"codec": codec}}
    found = predict(cluster, **given)
    result = run(tiny, tmp_path, "all-reduce", 8, cluster=cluster, options={"codec": codec}, max_steps=6)
    for taken_s in (simulate(cluster, **given, steps=20).step_s, median_step_s(result)):
        assert taken_s == pytest.approx(found.step_s, rel=0.01)


@pytest.mark.parametrize(("fragments", "codec"), [(1, "int8"), (2, "one-bit")])
def test_plans_of_coded_rounds_come_true(fragments: int, codec: str, tmp_path: Path) -> None:
    cluster, options = cluster_of(gbit_per_s=0.1), {"every": 4, "fragments": fragments, "codec": codec}
    found = predict(cluster, strategy="diloco", workers=3, work=LARGE, options=options)
    simulated = simulate(cluster, strategy="diloco", workers=3, work=LARGE, options=options, steps=20)
    result = run(large, tmp_path, "diloco", 3, cluster=cluster, options=options, max_steps=3)
    ends = [record.time_s for record in result.steps if record.worker == 0]
    for taken_s in (simulated.step_s, (ends[-1] - ends[3]) / (len(ends) - 4)):
        assert taken_s == pytest.approx(found.step_s, rel=0.05)
    plain = predict(cluster, strategy="diloco", workers=3, work=LARGE, options=options | {"codec": None})
    assert found.step_s < plain.step_s


@pytest.mark.parametrize("order", ["atc", "awc"])
def test_plans_of_coded_gossip_come_true(order: str, tmp_path: Path) -> None:
    cluster, options = cluster_of(gbit_per_s=0.1), {"codec": "int8", "order": order}
    found = predict(cluster, strategy="gossip", workers=4, work=LARGE, options=options)
    simulated = simulate(cluster, strategy="gossip", workers=4, work=LARGE, options=options, steps=20)
    assert simulated.step_s == pytest.approx(found.step_s, rel=0.05)
    if order == "atc":  # with awc what is under way in a pause is not counted, and so few steps have many pauses
        more = {**options, "own_scores": False}
        result = run(large, tmp_path, "gossip", 4, cluster=cluster, options=more, max_steps=3)
        assert step_s(result) == pytest.approx(found.step_s, rel=0.05)
    plain = predict(cluster, strategy="gossip", workers=4, work=LARGE, options={"order": order})
    assert found.step_s < 0.5 * plain.step_s
    assert found.link_bytes["worker's card"] == pytest.approx(2 * 2_000_044 * (1 + 4 / 256), rel=1e-3)


def test_running_sums_are_priced_as_large_as_they_are() -> None:
    """In float64, twice as large as models."""
    plain, twice = (
        predict(cluster_of(), strategy="gossip", workers=4, work=LARGE, options={"mode": mode}).link_bytes
        for mode in ("average", "running-sums")
    )
    assert twice["worker's card"] == 2 * plain["worker's card"]


@pytest.mark.parametrize("codec", ["int8", "top-k"])
def test_plans_of_shared_hosts_come_true(codec: str, tmp_path: Path) -> None:
    """Two workers a host: the host joins theirs first."""
    cluster, options = cluster_of(workers=2), {"codec": codec}
    found = predict(cluster, strategy="all-reduce", workers=6, work=LARGE, options=options)
    result = run(large, tmp_path, "all-reduce", 6, cluster=cluster, options=options, max_steps=6)
    assert step_s(result) == pytest.approx(found.step_s, rel=0.1)


def test_a_codec_helps_on_a_slow_link_and_not_on_a_fast_one() -> None:
    for gbit_per_s, helps in ((0.1, True), (1000.0, False)):
        plain, coded = (
            predict(cluster_of(gbit_per_s=gbit_per_s), strategy="all-reduce", workers=8, work=MATRICES, options=options)
            for options in ({}, {"codec": "int8"})
        )
        assert (coded.step_s < plain.step_s) == helps


def test_on_one_host_nothing_is_coded() -> None:
    plain, coded = (
        predict(cluster_of(workers=4), strategy="all-reduce", workers=4, work=MATRICES, options=options)
        for options in ({"bucket_mb": 1024.0}, {"codec": "int8"})
    )
    assert coded.link_bytes == pytest.approx(plain.link_bytes, rel=1e-4)


def test_bytes_on_a_card() -> None:
    """Of eight workers: seven eighths, twice, of what is summed in parts; seven times what everyone gets."""
    num_elements = 4_000_000
    for codec, expected in (
        (Int8(), 2 * 7 / 8 * num_elements * (1 + 4 / 256)),
        (OneBit(), 2 * 7 / 8 * num_elements * (1 / 8 + 4 / 2048)),
        (TopK(ratio=0.01), 7 * num_elements * 0.01 * 8),
        (RandomK(ratio=0.1), 2 * 7 / 8 * num_elements * 0.1 * 4),
        (PowerSGD(rank=4, start=0), 2 * 7 / 8 * 4 * 4 * 4 * 2000),
    ):
        found = predict(cluster_of(), strategy="all-reduce", workers=8, work=MATRICES, options={"codec": str(codec)})
        assert found.link_bytes["worker's card"] == pytest.approx(expected, rel=0.01)


def test_shapes() -> None:
    assert shapes_of(LARGE)[1] == (4, 10)
    assert shapes_of(MATRICES) == [(1000, 1000)] * 4
    assert payload_bytes(PowerSGD(rank=2), MATRICES) == 4 * 4 * 2 * 2000
    with pytest.raises(UsageError, match="1 shapes for 4 tensors"):
        StepWork(tensor_bytes=(4,) * 4, tensor_shapes=((1,),), samples=1)
