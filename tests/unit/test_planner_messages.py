"""What plans say of messages between workers, besides what passes links: worked by hand, beside the planner's simulator
and beside runs on the virtual engine, on cores of their own and on cores that hosts share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.description import Cluster, Communication, Compute, Hosts
from paceline.planner import StepWork, predict
from paceline.planner.algorithms import all_gather
from paceline.planner.setting import Setting
from paceline.planner.simulator import simulate
from tests.conformance.test_codecs import large
from tests.conformance.test_virtual_costs import step_s
from tests.conformance.virtual_cluster import run

STEP_S = 0.004
MESSAGE_S, CORE_S, FURTHER_S, FURTHER_CORE_S = 2e-3, 1e-3, 1e-3, 6e-4
HOP_S, HOP_CORE_S, OPERATION_S, OPERATION_CORE_S = 3e-3, 5e-4, 8e-4, 7e-4
COSTS = Communication(
    message_us=MESSAGE_S * 1e6,
    further_message_us=FURTHER_S * 1e6,
    message_core_us=CORE_S * 1e6,
    further_message_core_us=FURTHER_CORE_S * 1e6,
    operation_us=OPERATION_S * 1e6,
    operation_core_us=OPERATION_CORE_S * 1e6,
    hop_us=HOP_S * 1e6,
    hop_core_us=HOP_CORE_S * 1e6,
)
TURN_S, FURTHER_TURN_S = 4 * CORE_S, 4 * FURTHER_CORE_S
"""One message of each of four workers, both ends of each on one core; and one that follows another."""
WORK = StepWork(tensor_bytes=(16_384, 160, 16), tensor_shapes=((4096,), (4, 10), (4,)), samples=4)


def cluster_of(shared_cores: int | None, **compute: Any) -> Cluster:
    """Hosts whose links take next to nothing."""
    hosts = Hosts(count=8, bandwidth_gbit_per_s=1000.0, latency_us=0.01, memory_gbyte_per_s=1e6)
    return Cluster(
        hosts=(hosts,), compute=Compute(step_s=STEP_S, **compute), communication=COSTS, shared_cores=shared_cores
    )


FLAGS_S = 4 * OPERATION_CORE_S + (OPERATION_S - OPERATION_CORE_S) + 6 * 4 * HOP_CORE_S
"""A small all-reduce of four workers on one core."""
CASES: list[tuple[str, dict[str, Any], float, float]] = [  # what four workers' messages take alone, and on one core
    ("all-reduce", {"algorithm": "ring"}, 6 * MESSAGE_S, 6 * TURN_S),
    ("all-reduce", {"algorithm": "halving-doubling"}, 4 * MESSAGE_S, 4 * TURN_S),
    (
        "all-reduce",
        {"algorithm": "all-to-all"},
        2 * (MESSAGE_S + 2 * FURTHER_S),
        2 * (TURN_S + 2 * FURTHER_TURN_S),
    ),
    ("all-reduce", {"algorithm": "naive-ring"}, 3 * MESSAGE_S, 3 * TURN_S),
    (
        "all-reduce",
        {"codec": "top-k"},
        MESSAGE_S + 2 * FURTHER_S + OPERATION_S + 6 * HOP_S,
        TURN_S + 2 * FURTHER_TURN_S + FLAGS_S,
    ),
    ("gossip", {"topology": "ring"}, MESSAGE_S + FURTHER_S, TURN_S + FURTHER_TURN_S),
    ("gossip", {"topology": "one-peer"}, MESSAGE_S, TURN_S),
    ("gossip", {"topology": "everybody"}, MESSAGE_S + 2 * FURTHER_S, TURN_S + 2 * FURTHER_TURN_S),
    ("gossip", {"topology": "ring", "order": "awc"}, MESSAGE_S + FURTHER_S, TURN_S + FURTHER_TURN_S),
]


@pytest.mark.parametrize(("strategy", "options", "alone_s", "shared_s"), CASES, ids=str)
def test_messages_take_their_senders_and_cores_that_hosts_share_by_hand(
    strategy: str, options: dict[str, Any], alone_s: float, shared_s: float
) -> None:
    for cores, taken_s in ((None, STEP_S + alone_s), (1, 4 * STEP_S + shared_s)):
        found = predict(cluster_of(cores), strategy=strategy, workers=4, work=WORK, options=options)
        assert found.step_s == pytest.approx(taken_s, rel=0.02)


@pytest.mark.parametrize(("strategy", "options", "alone_s", "shared_s"), CASES, ids=str)
@pytest.mark.parametrize("cores", [None, pytest.param(2, marks=pytest.mark.slow), 1])
def test_plans_come_true(
    strategy: str, options: dict[str, Any], alone_s: float, shared_s: float, cores: int | None, tmp_path: Path
) -> None:
    """On two cores a worker's one message to a neighbour comes 9 % of a step later than planned."""
    assert_come_true(strategy, options, 4, cluster_of(cores), tmp_path)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("workers", [5, 6])
def test_stages_of_some_workers_take_their_messages_turns(workers: int, cores: int, tmp_path: Path) -> None:
    """The ranks above a power of two take part in the first stage and the last alone."""
    assert_come_true("all-reduce", {"algorithm": "halving-doubling"}, workers, cluster_of(cores), tmp_path)


@pytest.mark.parametrize("cores", [None, 4])
def test_a_hub_posts_all_before_it_goes_on(cores: int | None, tmp_path: Path) -> None:
    assert_come_true("gossip", {"topology": "star"}, 4, cluster_of(cores), tmp_path)


def assert_come_true(strategy: str, options: dict[str, Any], workers: int, cluster: Cluster, directory: Path) -> None:
    given: dict[str, Any] = {"strategy": strategy, "workers": workers, "work": WORK, "options": options}
    found = predict(cluster, **given)
    own = {**options, "own_scores": False} if strategy == "gossip" else options
    script = partial(large, shape=(4096,))
    result = run(script, directory, strategy, workers, cluster=cluster, options=own, max_steps=24)
    ends = [step.time_s for step in result.steps if step.worker == 0]
    assert (ends[-1] - ends[7]) / (len(ends) - 8) == pytest.approx(
        found.step_s, rel=0.1 if cluster.shared_cores == 2 else 0.06
    )
    assert simulate(cluster, **given, steps=20).step_s == pytest.approx(found.step_s, rel=0.02)


def test_the_simulator_knows_what_auto_chooses() -> None:
    given: dict[str, Any] = {"strategy": "gossip", "workers": 4, "work": WORK}
    given["options"] = {"topology": "ring", "codec": "auto"}
    found = predict(cluster_of(None), **given)
    assert simulate(cluster_of(None), **given, steps=20).step_s == pytest.approx(found.step_s, rel=0.02)


def test_who_posts_little_on_a_quiet_core_is_not_held_up() -> None:
    """The hub of a star posts three messages, and three hosts have one core each: while one is at an end of a message,
    the hub is at the next one."""
    found = predict(cluster_of(8), strategy="gossip", workers=4, work=WORK, options={"topology": "star"})
    assert found.step_s == pytest.approx(STEP_S + MESSAGE_S + 2 * (FURTHER_S - FURTHER_CORE_S / 2), rel=0.02)


def test_a_trees_messages_come_level_by_level() -> None:
    """Few are under way at a time, so that they hardly meet at a core. While one child takes a message in, its
    parent is at the other child's."""
    alone, shared = (
        predict(cluster_of(cores), strategy="all-reduce", workers=4, work=WORK, options={"algorithm": "tree"})
        for cores in (None, 1)
    )
    assert shared.step_s - alone.step_s == pytest.approx(3 * STEP_S - FURTHER_CORE_S / 2)


@pytest.mark.parametrize(("burst_kbyte", "hop_s"), [(0.0, 22e-3), (12.5, 21e-3), (50.0, 20e-3)])
def test_a_ring_makes_up_for_posting_by_what_cards_let_pass_at_once(
    burst_kbyte: float, hop_s: float, tmp_path: Path
) -> None:
    """A quarter of 1 MB passes a link of 100 Mbit/s in 20 ms, and each message is posted in 2 ms, in which the card is
    idle: 12.5 kB of what it then lets pass at once are 1 ms. 50 kB are 4 ms, of which the first message has two more,
    after the step's computing: plans leave these out."""
    (hosts,) = cluster_of(None).hosts
    slow = replace(hosts, bandwidth_gbit_per_s=0.1, burst_kbyte=burst_kbyte)
    cluster = replace(cluster_of(None), hosts=(slow,), communication=Communication(message_us=2000.0))
    given: dict[str, Any] = {"strategy": "all-reduce", "workers": 4, "options": {"algorithm": "ring"}}
    work = StepWork(tensor_bytes=(1_000_000, 160, 16), samples=4)
    found = predict(cluster, **given, work=work)
    assert found.step_s == pytest.approx(STEP_S + 6 * hop_s, rel=0.002)
    assert simulate(cluster, **given, work=work, steps=20).step_s == pytest.approx(found.step_s, rel=0.002)
    script = partial(large, shape=(250_000,))
    result = run(script, tmp_path, given["strategy"], 4, cluster=cluster, options=given["options"], max_steps=12)
    assert step_s(result) == pytest.approx(found.step_s - max(0.0, burst_kbyte * 1e3 / 12.5e6 - 2e-3), rel=0.002)


@pytest.mark.parametrize(("workers", "rounds"), [(4, 2), (5, 3), (8, 3)])
def test_an_all_gather_takes_a_hop_a_round(workers: int, rounds: int) -> None:
    work = replace(WORK, step_s=STEP_S)
    alone, shared = (
        all_gather(Setting.of(cluster_of(cores), work, num_workers=workers, num_servers=0), 8.0)[0]
        for cores in (None, 1)
    )
    assert alone == pytest.approx(OPERATION_S + rounds * HOP_S)
    operations_s = OPERATION_S + (workers - 1) * OPERATION_CORE_S  # one after the other
    assert shared == pytest.approx(operations_s + rounds * workers * HOP_CORE_S)
