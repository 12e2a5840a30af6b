"""Strategies that the package does not know: their plans follow from what they declare that they move."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import networkx
import pytest

from paceline.cluster.description import Cluster, Compute, Hosts, Racks
from paceline.errors import UsageError
from paceline.planner import StepWork, plan, predict, wording
from paceline.planner.simulator import simulate
from paceline.strategies import STRATEGIES, Entry
from paceline.strategies.base import Context, Replica, Strategy, Synchronizer
from paceline.strategies.parameter_server import ParameterServer
from paceline.strategies.traits import AllReduced, Neighbouring, Served, Traffic, Traits, Unit
from paceline.topology import Chain, Everybody, Graph, OnePeerExponential, Ring, Topology

B = 125e6
STEP_S = 0.1
WORK = StepWork(tensor_bytes=(1_000_000,) * 4, samples=32)
NAME = "of-a-user"


@final
@dataclass(frozen=True, kw_only=True)
class Declared(Strategy):
    """Of a class outside the package, which says nothing but what it moves."""

    traffic: tuple[Traffic, ...] | None = None
    unit: Unit = "update"
    num_servers: int = 0

    @property
    def traits(self) -> Traits:
        return Traits(lock_step=False, unit=self.unit, num_servers=self.num_servers, traffic=self.traffic)

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        raise AssertionError("a plan runs nothing")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def register(monkeypatch: pytest.MonkeyPatch, **fixed: object) -> None:
    assert isinstance(STRATEGIES, dict)
    monkeypatch.setitem(STRATEGIES, NAME, Entry(name=NAME, strategy=Declared, fixed=fixed, summary="what a user wrote"))


def cluster_of(count: int = 16, *, latency_us: float = 0.0, racks: Racks | None = None, **compute: object) -> Cluster:
    hosts = Hosts(count=count, bandwidth_gbit_per_s=1.0, latency_us=latency_us, memory_gbyte_per_s=1e6)
    return Cluster(hosts=(hosts,), racks=racks, compute=Compute(step_s=STEP_S, **compute))  # type: ignore[arg-type]


# --- neighbours ------------------------------------------------------------------------------------------------------


def test_neighbours_by_hand() -> None:
    """4 MB to either side through a card of 1 Gbit/s: 64 ms, and a latency."""
    cluster, strategy = cluster_of(latency_us=1000.0), Declared(traffic=(Neighbouring(topology=Ring()),))
    found = predict(cluster, strategy=strategy, workers=8, work=WORK)
    assert found.exchange_s == pytest.approx(2 * 4e6 / B + 1e-3)
    assert found.link_bytes == pytest.approx({"worker's card": 8e6})
    everyone = Declared(traffic=(Neighbouring(topology=Everybody()),))
    assert predict(cluster, strategy=everyone, workers=8, work=WORK).link_bytes == pytest.approx(
        {"worker's card": 28e6}
    )
    assert predict(cluster, strategy=strategy, workers=1, work=WORK).step_s == pytest.approx(STEP_S)


def test_messages_that_leave_before_the_gradient_hide_behind_it() -> None:
    """64 ms of 100 behind a step; of a model twice as large, 28 are seen."""
    behind = Declared(traffic=(Neighbouring(topology=Ring(), behind_computing=True),))
    found = predict(cluster_of(), strategy=behind, workers=8, work=WORK)
    assert found.step_s == pytest.approx(STEP_S)
    assert found.hidden_s == pytest.approx(2 * 4e6 / B)
    slow = predict(cluster_of(), strategy=behind, workers=8, work=replace(WORK, tensor_bytes=(8_000_000,)))
    assert slow.step_s == pytest.approx(4 * 4e6 / B)


@pytest.mark.parametrize(
    "moved",
    [
        Neighbouring(topology=Ring(), behind_computing=True),
        AllReduced(every=4, fragments=2, delay=1),
    ],
)
def test_messages_hide_behind_all_that_a_worker_does(moved: Neighbouring | AllReduced) -> None:
    """Messages take 128 ms, or 112 for a fragment; a step computes for 100 and takes 20 besides."""
    work, strategy = replace(WORK, tensor_bytes=(8_000_000,), overhead_s=0.02), Declared(traffic=(moved,))
    if isinstance(moved, AllReduced):
        work, strategy = replace(work, tensor_bytes=(8_000_000,) * 2), replace(strategy, unit="round")
    found = predict(cluster_of(), strategy=strategy, workers=8, work=work)
    assert found.step_s == pytest.approx(4 * 4e6 / B if isinstance(moved, Neighbouring) else STEP_S + 0.02)
    simulated = simulate(cluster_of(), strategy=strategy, workers=8, work=work, steps=100)
    assert simulated.step_s == pytest.approx(found.step_s, rel=0.01)


def test_the_slowest_link_decides() -> None:
    """Racks of four: the two workers at the ends of each share nothing but the cable, of a tenth of a card's rate."""
    racks = Racks(hosts=4, bandwidth_gbit_per_s=0.1, latency_us=0.0)
    strategy = Declared(traffic=(Neighbouring(topology=Ring()),))
    found = predict(cluster_of(racks=racks), strategy=strategy, workers=8, work=WORK)
    assert found.exchange_s == pytest.approx(10 * 2 * 4e6 / B)
    assert found.resource == "a rack's cable"


def test_links_are_loaded_with_the_mean_of_a_period() -> None:
    """Racks of two, with a fast cable: one of two messages leaves them at 1 place's distance, both at 2 and 4."""
    racks = Racks(hosts=2, bandwidth_gbit_per_s=10.0, latency_us=0.0)
    strategy = Declared(traffic=(Neighbouring(topology=OnePeerExponential()),))
    found = predict(cluster_of(racks=racks), strategy=strategy, workers=8, work=WORK)
    expected = {"worker's card": 4e6, "rack's cable": (1 + 2 + 2) / 3 * 4e6, "core": (4 + 8 + 8) / 3 * 4e6}
    assert found.link_bytes == pytest.approx(expected)


def test_a_graph_of_other_workers_is_refused() -> None:
    strategy = Declared(traffic=(Neighbouring(topology=Graph(networkx.path_graph(4))),))
    assert predict(cluster_of(), strategy=strategy, workers=4, work=WORK).exchange_s > 0
    with pytest.raises(UsageError, match="no topology of 5 workers"):
        predict(cluster_of(), strategy=strategy, workers=5, work=WORK)


@pytest.mark.parametrize("distribution", [{}, {"distribution": "log-normal", "variation": 0.3}])
@pytest.mark.parametrize("topology", [Ring(), Everybody(), OnePeerExponential(), Chain()], ids=repr)
@pytest.mark.parametrize("behind_computing", [False, True])
def test_neighbours_are_waited_for_as_in_the_simulator(
    topology: Topology, distribution: dict[str, object], behind_computing: bool
) -> None:
    moved = Neighbouring(topology=topology, behind_computing=behind_computing)
    cluster, strategy = cluster_of(**distribution), Declared(traffic=(moved,))
    work = replace(WORK, tensor_bytes=(4000,))
    found = predict(cluster, strategy=strategy, workers=12, work=work)
    simulated = simulate(cluster, strategy=strategy, workers=12, work=work, steps=300)
    assert found.step_s == pytest.approx(simulated.step_s, rel=0.05 if distribution else 0.01)
    assert found.step_s_low <= found.step_s <= found.step_s_high


# --- several steps from one exchange to the next ---------------------------------------------------------------------

EVERY_8 = {
    "all-reduced": Declared(traffic=(AllReduced(every=8),), unit="round"),
    "behind backward": Declared(traffic=(AllReduced(every=8, behind_backward=True),), unit="round"),
    "ring": Declared(traffic=(AllReduced(every=8, algorithm="ring"),), unit="round"),
    "neighbours": Declared(traffic=(Neighbouring(topology=Ring(), every=8),), unit="round"),
    "served": Declared(traffic=(Served(every=8),), unit="round", num_servers=1),
    "asynchronous": Declared(traffic=(Served(every=8, staleness=math.inf),), unit="gradient", num_servers=1),
}


@pytest.mark.parametrize("strategy", EVERY_8.values(), ids=EVERY_8)
def test_the_exchange_is_divided_among_the_steps(strategy: Declared) -> None:
    """Of 8 steps one exchanges; on links of no delay, what it takes and puts on them is an eighth a step."""
    (moved,) = strategy.traffic or ()
    every_step = replace(strategy, traffic=(replace(moved, every=1),))
    work = replace(WORK, overhead_s=0.01)
    seldom, always = (predict(cluster_of(), strategy=s, workers=4, work=work) for s in (strategy, every_step))
    assert seldom.step_s - work.overhead_s - STEP_S == pytest.approx(seldom.exchange_s + seldom.waiting_s)
    if strategy.unit == "round":
        assert seldom.exchange_s == pytest.approx(always.exchange_s / 8)
        assert seldom.iteration_s == pytest.approx(8 * seldom.step_s)
        assert seldom.global_batch == pytest.approx(4 * work.samples)
    else:
        assert seldom.iteration_s == pytest.approx(seldom.step_s / 4)
    assert seldom.link_bytes == pytest.approx({kind: size / 8 for kind, size in always.link_bytes.items()})
    simulated = simulate(cluster_of(), strategy=strategy, workers=4, work=work, steps=50)
    assert 0.98 * seldom.step_s_low <= simulated.step_s <= 1.02 * seldom.step_s_high


def test_the_slowest_of_many_steps_is_nearer_to_the_mean() -> None:
    """What chance adds falls with the root of the number of steps; a host that is always slower stays so."""
    cluster = cluster_of(distribution="exponential")
    work = replace(WORK, tensor_bytes=(4,))
    once, seldom = (
        predict(cluster, strategy=Declared(traffic=(AllReduced(every=every),)), workers=8, work=work)
        for every in (1, 16)
    )
    assert seldom.waiting_s == pytest.approx(once.waiting_s / 4)
    slow = Hosts(name="slow", speed=0.5, bandwidth_gbit_per_s=1.0)
    mixed = replace(cluster_of(4), hosts=(*cluster_of(4).hosts, slow))
    found = predict(mixed, strategy=Declared(traffic=(AllReduced(every=16),)), workers=5, work=work)
    assert found.compute_s + found.waiting_s == pytest.approx(2 * STEP_S)


# --- fragments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", [{}, {"distribution": "log-normal", "variation": 0.3}])
@pytest.mark.parametrize(("fragments", "delay"), [(4, 0), (4, 1), (2, 1), (2, 3), (1, 4)])
def test_fragments_are_waited_for_as_in_the_simulator(
    fragments: int, delay: int, distribution: dict[str, object]
) -> None:
    strategy = Declared(traffic=(AllReduced(every=8, fragments=fragments, delay=delay),), unit="round")
    work = replace(WORK, tensor_bytes=(1_000_000,) * 8)
    found = predict(cluster_of(**distribution), strategy=strategy, workers=8, work=work)
    simulated = simulate(cluster_of(**distribution), strategy=strategy, workers=8, work=work, steps=300)
    assert found.step_s == pytest.approx(simulated.step_s, rel=0.05 if distribution else 0.001)
    assert found.step_s_low <= found.step_s <= found.step_s_high


def test_a_fragment_hides_behind_the_steps_of_its_delay() -> None:
    """A ring of 8 moves 14 / 8 of 8 MB: 112 ms a round of eight steps. Four fragments of it take 28 ms each, less than
    a step; on a tenth of the bandwidth 280 ms, of which a step hides 100."""
    work = replace(WORK, tensor_bytes=(1_000_000,) * 8)
    moved = AllReduced(every=8, fragments=4, delay=1)
    hidden, shown = (
        predict(cluster, strategy=Declared(traffic=(each,), unit="round"), workers=8, work=work)
        for cluster, each in ((cluster_of(), moved), (cluster_of(), replace(moved, delay=0)))
    )
    assert (hidden.exchange_s, hidden.hidden_s) == pytest.approx((0.0, 0.014), abs=1e-9)
    assert (shown.exchange_s, shown.hidden_s) == pytest.approx((0.014, 0.0), abs=1e-9)
    assert hidden.link_bytes == shown.link_bytes == pytest.approx({"worker's card": 14e6 / 8})
    slow = replace(cluster_of(), hosts=(replace(cluster_of().hosts[0], bandwidth_gbit_per_s=0.1),))
    found = predict(slow, strategy=Declared(traffic=(moved,), unit="round"), workers=8, work=work)
    assert found.hidden_s == pytest.approx(4 * STEP_S / 8)
    assert found.exchange_s == pytest.approx(4 * (0.28 - STEP_S) / 8)
    with pytest.raises(UsageError, match="fragments must be at most 4"):
        predict(cluster_of(), strategy=Declared(traffic=(replace(moved, fragments=5),)), workers=2, work=WORK)


# --- what is refused, and what is registered -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("traffic", "said"),
    [
        (None, f"strategy {NAME} does not say what it moves, so no plan can price it; run it on the virtual engine"),
        ((AllReduced(), Served()), "moves several things in one step, so no plan can price it"),
    ],
)
def test_what_cannot_be_priced_is_refused(traffic: tuple[Traffic, ...] | None, said: str) -> None:
    for asked in (predict, simulate):
        with pytest.raises(UsageError, match=said):
            asked(cluster_of(), strategy=Declared(traffic=traffic), workers=2, work=WORK)


def test_what_a_script_does_by_itself_is_measured_and_not_planned() -> None:
    said = "strategy horovod leaves to the script what moves, so no plan can price it; measure it with `paceline run`"
    for asked in (predict, simulate):
        with pytest.raises(UsageError, match=said):
            asked(cluster_of(), strategy="horovod", workers=2, work=WORK)
    assert "horovod" not in {*plan(cluster_of(2), WORK, num_checks=0).unpriced}


def test_what_the_package_s_own_strategies_declare_is_all_that_counts() -> None:
    known = ParameterServer(consistency="ssp", staleness=2, servers=2)
    twin = Declared(traffic=known.traits.traffic, unit="gradient", num_servers=2)
    found, other = (predict(cluster_of(), strategy=s, workers=6, work=WORK) for s in (known, twin))
    assert replace(other, strategy=found.strategy) == found


def test_a_plan_has_a_user_s_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, traffic=(AllReduced(every=500),))
    found = plan(cluster_of(), replace(WORK, tensor_bytes=(40_000_000,)), num_checks=1)
    assert found.best.label == NAME
    assert found.checks[0].label == NAME
    assert set(found.frame.loc[found.frame["strategy"] == NAME, "unit"]) == {"update"}
    assert any(line.startswith(f"{NAME}: ") for line in wording.answer(found))


def test_rounds_of_local_steps_are_priced_and_not_ranked_by_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many more steps they take to a target it does not say, so that they win no plan by taking them quickly."""
    register(monkeypatch, traffic=(AllReduced(every=500),), unit="round")
    found = plan(cluster_of(), replace(WORK, tensor_bytes=(40_000_000,)), num_checks=0)
    quickest = max(found.best_of_each, key=lambda point: point.merit)
    assert (quickest.label, quickest.is_ranked) == (NAME, False)
    assert found.best.is_ranked
    (line,) = [line for line in wording.answer(found) if "give --noise-scale measure" in line]
    assert NAME in line
    assert "local-sgd" in line


def test_a_plan_says_which_strategy_it_leaves_out() -> None:
    found = plan(cluster_of(4), WORK, num_checks=0)
    assert NAME not in set(found.frame["strategy"])
    said = wording.answer(found)
    assert f"Left out: {NAME}, which does not say what it moves." in said
    assert any(
        line.startswith("Left out: fed-avg, dp-fed-avg and scaffold, each of which has clients, and") for line in said
    )
