"""What exchanges take of workers: worked by hand, with cores that hosts share and without."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import FileStore

from paceline.cluster.description import Cluster, Communication, Compute, Hosts
from paceline.cluster.worker_costs import Cost, WorkerCosts
from paceline.comm.base import Collective
from paceline.probing import bursts
from tests.unit.collective_harness import World

COSTS = Communication(
    operation_us=50.0,
    operation_core_us=400.0,
    message_us=900.0,
    further_message_us=250.0,
    message_core_us=700.0,
    further_message_core_us=300.0,
)


def costs_of(costs: Communication, *, shared_cores: int | None) -> WorkerCosts:
    hosts = (Hosts(bandwidth_gbit_per_s=1.0),)
    cluster = Cluster(hosts=hosts, compute=Compute(step_s=1.0), communication=costs, shared_cores=shared_cores)
    return WorkerCosts.of(cluster)


def test_a_burst_takes_its_sender_longest_for_its_first_message() -> None:
    costs = costs_of(COSTS, shared_cores=2)
    assert costs.taken_core_s == pytest.approx(150e-6)
    # The receiver's end of each is the same, and part of the time that a message takes.
    assert costs.message == pytest.approx(Cost(750e-6, 550e-6))
    assert costs.further_message == pytest.approx(Cost(150e-6, 150e-6))  # 100 us, but that its core works for longer
    assert costs.operation == pytest.approx(Cost(400e-6, 400e-6))
    assert costs.burst(3) == pytest.approx(Cost(1050e-6, 850e-6))
    # So all of three take a core both ends of one first message and of two further ones.
    assert costs.burst(3).core_s + 3 * costs.taken_core_s == pytest.approx(700e-6 + 2 * 300e-6)
    assert costs.burst(0) == Cost(0.0, 0.0)


def test_cores_that_nobody_shares_are_not_asked() -> None:
    costs = costs_of(COSTS, shared_cores=None)
    assert costs.taken_core_s == 0.0
    assert costs.burst(3) == pytest.approx(Cost(1400e-6, 0.0))
    assert costs.operation == pytest.approx(Cost(50e-6, 0.0))


def test_each_message_is_as_the_first_one_unless_it_is_said() -> None:
    costs = costs_of(Communication(message_us=900.0, message_core_us=700.0), shared_cores=1)
    assert costs.message == costs.further_message == pytest.approx(Cost(550e-6, 350e-6))
    assert costs.taken_core_s == pytest.approx(350e-6)


def measured(path: Path, collective: Collective) -> dict[str, float]:
    other, store = 1 - collective.rank, FileStore(str(path), 2)

    def swap(text: str) -> str:
        return str(collective.all_gather_object(text)[other])

    with bursts.peers(store, swap, address="127.0.0.1", is_first=collective.rank == 0) as ways:
        assert len(ways) == bursts.BURST
        return asdict(bursts.measure(bursts.Way(collective, other), ways))


def test_a_probe_measures_one_message_and_several_over_ways_of_their_own(tmp_path: Path) -> None:
    with World("gloo", 2) as pair:
        for cost in pair.run(partial(measured, tmp_path / "store")):
            for one, burst in (("message_s", "burst_s"), ("message_core_s", "burst_core_s")):
                assert 1e-6 < cost[one] < cost[burst]
