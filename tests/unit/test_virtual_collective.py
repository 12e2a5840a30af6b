"""The virtual collective: results as of the real ones, times from messages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.comm.algorithms import ALGORITHMS
from paceline.comm.base import Collective
from paceline.planner import StepWork, algorithms
from paceline.planner.setting import Setting
from tests.ranks import RankFailed
from tests.unit.test_collectives import (
    test_all_gather,
    test_all_to_all,
    test_broadcast,
    test_gather,
    test_objects,
    test_scatter,
)
from tests.unit.test_collectives_reductions import (
    test_all_reduce,
    test_half_precision_is_accumulated_in_single,
    test_mean_of_integers_truncates_towards_zero,
    test_reduce_scatter,
)
from tests.unit.virtual_world import GIGABIT, VirtualWorld

__all__ = [
    "test_all_gather",
    "test_all_reduce",
    "test_all_to_all",
    "test_broadcast",
    "test_gather",
    "test_half_precision_is_accumulated_in_single",
    "test_mean_of_integers_truncates_towards_zero",
    "test_objects",
    "test_reduce_scatter",
    "test_scatter",
]

LATENCY_S = 200e-6


@pytest.fixture(params=[2, 3, 5])
def world(request: pytest.FixtureRequest) -> VirtualWorld:
    return VirtualWorld(request.param)


# --- time ------------------------------------------------------------------------------------------------------------


def reduce(collective: Collective, num_elements: int, algorithm: str) -> float:
    tensor = torch.full((num_elements,), collective.rank + 1.0)
    if algorithm == "auto":
        collective.all_reduce(tensor, op="mean").wait()
    else:
        ALGORITHMS[algorithm](collective, tensor, op="mean")
    assert float(tensor[0]) == float(tensor[-1]) == (collective.size + 1) / 2
    return collective.timing.communication_s + collective.timing.waiting_s


def ring_s(size: int, num_bytes: float) -> float:
    return 2 * (size - 1) * (num_bytes / (size * GIGABIT) + LATENCY_S)


def halving_doubling_s(size: int, num_bytes: float) -> float:
    return 2 * math.log2(size) * LATENCY_S + 2 * (size - 1) / size * num_bytes / GIGABIT


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    ("algorithm", "expected_s"), [("auto", ring_s), ("ring", ring_s), ("halving-doubling", halving_doubling_s)]
)
def test_all_reduce_takes_the_textbook_time(size: int, algorithm: str, expected_s: Any) -> None:
    num_elements = 2_000_000
    times = VirtualWorld(size, latency_us=LATENCY_S * 1e6).run(reduce, num_elements, algorithm)
    assert times == pytest.approx([expected_s(size, 4 * num_elements)] * size, rel=0.01)


@pytest.mark.parametrize(("size", "depth"), [(2, 1), (4, 2), (8, 3), (16, 4)])
def test_tree_takes_two_latencies_a_level(size: int, depth: int) -> None:
    """Up and down; neither tree waits for the other."""
    world = VirtualWorld(size, latency_us=LATENCY_S * 1e6)
    world.run(reduce, 16, "tree")
    assert world.took_s == pytest.approx(2 * depth * LATENCY_S, rel=0.01)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 14])
@pytest.mark.parametrize("num_elements", [500_000, 2_500_000, 8_000_000])
def test_a_plan_knows_what_two_trees_take(size: int, num_elements: int) -> None:
    """Of one piece in either tree to four, also where the number of ranks is no power of two."""
    world = VirtualWorld(size, latency_us=LATENCY_S * 1e6)
    world.run(reduce, num_elements, "tree")
    hosts = Hosts(count=size, bandwidth_gbit_per_s=GIGABIT * 8e-9, latency_us=LATENCY_S * 1e6)
    cluster = Cluster(hosts=(hosts,), compute=Compute(step_s=1.0))
    num_bytes = 4.0 * num_elements
    setting = Setting.of(cluster, StepWork(tensor_bytes=(int(num_bytes),), samples=1), num_workers=size, num_servers=0)
    assert algorithms.time_s("tree", setting, num_bytes) == pytest.approx(world.took_s, rel=0.035)


def test_waiting_is_told_from_communicating() -> None:
    """One rank comes a second late: the others wait for it that long, and all communicate as long."""
    world = VirtualWorld(4, latency_us=0.0)

    def late(collective: Collective) -> None:
        if collective.rank == 2:
            world.collectives[2]._process.advance(1.0)
        reduce(collective, 1_000_000, "auto")

    world.run(late)
    for rank, collective in enumerate(world.collectives):
        assert collective.timing.waiting_s == pytest.approx(0.0 if rank == 2 else 1.0, abs=1e-9)
        assert collective.timing.communication_s <= ring_s(4, 4e6)
        assert collective.timing.moved_bytes == 6_000_000
    assert world.collectives[2].timing.communication_s > 0.5 * ring_s(4, 4e6)
    assert 1.0 < world.took_s <= 1.0 + ring_s(4, 4e6)


def test_operations_overlap_with_computing_and_with_each_other() -> None:
    """Two tensors started while a rank computes for longer than they take cost nothing when they are waited for."""
    world = VirtualWorld(4)

    def overlapped(collective: Collective) -> float:
        tensors = [torch.ones(1_000_000) for _ in range(2)]
        process = world.collectives[collective.rank]._process
        works = []
        for tensor in tensors:
            process.advance(0.5)
            works.append(collective.all_reduce(tensor))
        process.advance(1.0)
        for work in works:
            work.wait()
        assert all(float(tensor[0]) == 4 for tensor in tensors)
        return collective.timing.communication_s + collective.timing.waiting_s

    assert world.run(overlapped) == [0.0] * 4
    assert world.took_s == 2.0


# --- disagreements ---------------------------------------------------------------------------------------------------


def test_ranks_that_ask_for_different_things_are_told_so() -> None:
    def differ(collective: Collective) -> None:
        collective.all_reduce(torch.ones(3 + (collective.rank == 1))).wait()

    with pytest.raises(RankFailed) as failure:
        VirtualWorld(3).run(differ)
    for rank in range(3):
        assert f"rank {rank}: " in str(failure.value)
    assert "CallMismatch: ranks do not ask for the same: rank 0 for all_reduce(sum) of 3 elements" in str(failure.value)


def test_a_message_of_another_size_is_told_to_the_receiver() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 sends 3 elements of torch\.float32, and rank 1 receives 4"):
        VirtualWorld(2).run_each(
            [lambda c: c.send(torch.ones(3), destination=1).wait(), lambda c: c.recv(torch.ones(4), source=0).wait()]
        )


def test_who_waits_in_vain_is_named_with_what_for() -> None:
    with pytest.raises(RankFailed) as failure:
        VirtualWorld(3).run_each([lambda c: c.barrier(), lambda c: c.recv(torch.ones(4), source=0).wait(), lambda c: 0])
    assert "rank-0 waits for barrier, to which rank(s) 1, 2 have not come" in str(failure.value)
    assert "rank-1 waits for 4 elements from rank 0" in str(failure.value)


def test_messages_arrive_in_the_order_of_the_calls() -> None:
    def exchange(collective: Collective) -> list[float]:
        other = 1 - collective.rank
        targets = [torch.zeros(size) for size in (300_000, 1, 7)]
        receiving = [collective.recv(target, source=other) for target in targets]
        for number, target in enumerate(targets):
            sent = torch.full_like(target, 10.0 * collective.rank + number)
            collective.send(sent, destination=other)
            sent.fill_(-1.0)  # it has been taken
        for work in receiving:
            work.wait()
        return [float(target[-1]) for target in targets]

    assert VirtualWorld(2).run(exchange) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]
