"""What plans take it to cost that workers' models differ between exchanges, and how they rank those strategies."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.codec import FP8, QSGD, Auto, Int8, PowerSGD, TopK
from paceline.errors import UsageError
from paceline.planner import StepWork, wording
from paceline.planner.apart import Apart
from paceline.planner.coded import leaves_out_little
from paceline.planner.noise import NoiseScale
from paceline.planner.search import Plan, Point, plan
from paceline.strategies import build
from paceline.topology import Everybody, OnePeerExponential, Ring, Topology

WORKERS = 8
WORK = StepWork(tensor_bytes=(4_000_000,), samples=32)
NOISE = NoiseScale(6.0 * WORK.samples)


def apart(text: str, workers: int = WORKERS) -> Apart:
    found = Apart.of(build(text).traits, workers)
    assert found is not None
    return found


def drift(text: str, noise: NoiseScale = NOISE) -> float:
    return apart(text).drift(noise, batch=WORK.samples, num_workers=WORKERS)


def naive_share(topology: Topology, *, every: int, lag: int, memory: float) -> float:
    """The twin: matrices multiplied one after the other, from every step that a worker may be at."""
    kept, steps = 1 - 1 / memory, every * topology.period(WORKERS)
    shares = []
    for now in range(steps):
        product, share = torch.eye(WORKERS, dtype=torch.float64), 0.0
        for age in range(1, 400):
            exchanged = now - age + 1 + lag  # which noise of this age has been through, too
            if age > lag and exchanged % every == 0:
                product = product @ topology.matrix(exchanged // every % topology.period(WORKERS), WORKERS)
            excess = (float(product.square().sum()) - 1) / (WORKERS - 1)
            share += (1 - kept) * kept ** (age - 1) * excess
        shares.append(share)
    return sum(shares) / len(shares)


@pytest.mark.parametrize(
    ("text", "topology", "every", "lag"),
    [
        ("local-sgd:every=4", Everybody(), 4, 0),
        ("gossip:topology=ring", Ring(), 1, 0),
        ("gossip:topology=ring:every=3", Ring(), 3, 0),
        ("sgp:topology=one-peer", OnePeerExponential(), 1, 0),
        ("sgp:topology=one-peer:order=awc", OnePeerExponential(), 1, 1),
    ],
)
def test_a_worker_s_own_share_of_the_noise(text: str, topology: Topology, every: int, lag: int) -> None:
    for memory in (1.5, 6.0):
        known = naive_share(topology, every=every, lag=lag, memory=memory)
        assert apart(text).own_share(memory) == pytest.approx(known, abs=2e-3)


def test_rounds_cost_more_the_longer_they_are_and_never_more_than_one_worker_needs() -> None:
    """At a noise scale of six batches one worker needs 7 / 1.75 = 4 times the steps of eight together."""
    assert drift("local-sgd:every=1") == pytest.approx(1.0)
    found = [drift(f"local-sgd:every={every}") for every in (1, 2, 5, 20, 100, 10_000)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(7**2 / (14 - 1.75) / 1.75, rel=0.01), "the rate of one worker, by hand"
    assert found[-1] < 4


def test_it_costs_nothing_without_noise_and_where_nothing_but_noise_counts() -> None:
    """Alike data give the same gradients without noise; infinite noise makes rates so small that models stay close."""
    for samples in (0.0, math.inf):
        assert drift("local-sgd", NoiseScale(samples)) == pytest.approx(1.0)
    assert drift("local-sgd", NoiseScale(1e9)) == pytest.approx(1.0, abs=0.01)


def test_denser_topologies_cost_less() -> None:
    names = ("everybody", "exponential", "ring", "chain")
    found = [drift(f"gossip:topology={name}") for name in names]
    assert found == sorted(found)
    assert found[0] == pytest.approx(1.0)
    assert drift("gossip:topology=ring:order=awc") > drift("gossip:topology=ring")


@pytest.mark.parametrize("text", ["relay", "noloco", "ad-psgd", "diloco:delay=5", "fed-avg", "all-reduce"])
def test_there_is_no_rule_for_others(text: str) -> None:
    assert Apart.of(build(text).traits, WORKERS) is None


# --- plans -----------------------------------------------------------------------------------------------------------


def planned(
    gbit_per_s: float,
    *,
    noise: NoiseScale | None = NOISE,
    strategies: list[str] | None = None,
    single_steps: float | None = None,
) -> Plan:
    hosts = Hosts(count=WORKERS, bandwidth_gbit_per_s=gbit_per_s, latency_us=10.0, memory_gbyte_per_s=1e4)
    cluster = Cluster(hosts=(hosts,), compute=Compute(step_s=0.1))
    return plan(cluster, WORK, noise=noise, strategies=strategies, single_steps=single_steps, num_checks=1)


def of(found: Plan, label: str) -> Point:
    return next(p for p in found.points if p.label == label and p.prediction.workers == WORKERS)


def test_bandwidth_decides_the_family() -> None:
    slow, fast = planned(0.05), planned(100.0)
    assert slow.best.label.startswith("local-sgd")
    assert not fast.best.label.startswith(("local-sgd", "des-loc", "gossip"))
    assert slow.checks[0].label == slow.best.label
    (said,) = [line for line in wording.answer(slow) if line.startswith("Workers whose models differ")]
    assert f"{slow.best.label} {slow.best.drift:.1f}" in said


def test_one_worker_needs_no_rounds() -> None:
    """With the noise of a tenth of a batch no exchange pays; of names that are the same then, it is the simplest."""
    found = planned(0.05, noise=NoiseScale(3.0))
    assert (found.best.label, found.best.prediction.workers) == ("single", 1)


def test_what_rounds_cost_is_in_the_time_to_target() -> None:
    found = planned(0.05)
    for every in (2, 5, 10, 20):
        point = of(found, f"local-sgd:every={every}")
        together = (1 + 6) / (1 + 6 / WORKERS) * 0.1 / point.prediction.step_s
        assert point.target_speedup == pytest.approx(together / point.drift)
        assert point.drift == pytest.approx(drift(point.label))


def test_a_run_that_is_known_to_be_short_pays_for_the_round_it_ends_in() -> None:
    """A target is as likely to be met at any step of a round, and seen at its end: (every - 1) / 2 steps later."""
    every = {"single": 1, "all-reduce": 1, "local-sgd:every=1": 1, "local-sgd:every=10": 10, "gossip:every=10": 1}
    every |= {"async-diloco:every=10:quorum=3": 10}
    free, short = (planned(0.05, strategies=[*every], single_steps=steps) for steps in (None, 50.0))
    for without, with_round in zip(free.points, short.points, strict=True):
        assert without.target_speedup is not None
        late_s = (every[with_round.asked] - 1) / 2 * without.prediction.update_s
        known_s = 50 * 0.1 / without.target_speedup + late_s
        assert with_round.target_s == pytest.approx(known_s)
        assert with_round.target_speedup == pytest.approx(50 * 0.1 / known_s)
    assert {point.asked for point in free.points} == set(every)


def test_rounds_are_shorter_the_shorter_the_run() -> None:
    """A run of few steps has no use for rounds of half as many; a long one plans as if its length were not known."""
    found = [planned(0.05, strategies=["single", "local-sgd"], single_steps=steps) for steps in (4.0, 60.0, 1e6)]
    lengths = [point.best.prediction.iteration_s / point.best.prediction.step_s for point in found]
    assert lengths == sorted(lengths)
    assert found[0].best.label == "single"
    assert lengths[1] < lengths[2]
    assert found[2].best.label == planned(0.05, strategies=["single", "local-sgd"]).best.label


def test_nothing_is_ranked_that_no_plan_knows() -> None:
    by_rate = planned(0.05, noise=None)
    assert of(by_rate, "local-sgd").unranked == "no noise scale"
    assert any("give --noise-scale measure" in line for line in wording.answer(by_rate))
    assert of(planned(0.05), "noloco").unranked == "no rule"


def test_strategies_may_be_given_with_their_codecs() -> None:
    asked = ["all-reduce", "all-reduce:codec=int8", "all-reduce:codec=top-k", "local-sgd:every=8"]
    found = planned(0.05, strategies=asked)
    assert [point.label for point in found.best_of_each] == asked
    assert of(found, "all-reduce:codec=top-k").unranked == "codec"
    assert of(found, "all-reduce:codec=int8").is_ranked
    assert any("top-k" in line and "leaves out much" in line for line in wording.answer(found))
    with pytest.raises(UsageError, match="unknown strategy 'al-reduce'"):
        planned(0.05, strategies=["al-reduce"])


def test_what_is_asked_for_twice_is_looked_at_once() -> None:
    """One length of rounds is also among those that the name alone stands for."""
    found = planned(0.05, strategies=["single", "single", "local-sgd", "local-sgd:every=20"])
    assert [len(curve) for label, curve in found.curves.items() if label == "local-sgd:every=20"] == [6]
    assert [point.asked for point in found.best_of_each] == ["single", "local-sgd", "local-sgd:every=20"]


def test_codecs_that_leave_out_little() -> None:
    assert all(map(leaves_out_little, (Int8(), FP8(), Auto(among="bf16+int8"))))
    assert not any(map(leaves_out_little, (QSGD(bits=2), TopK(), PowerSGD(), Auto())))


def test_a_codec_that_is_chosen_by_the_plan_gains_on_slow_links_alone() -> None:
    asked = ["all-reduce", "all-reduce:codec=auto:codec.among=bf16+int8"]
    slow, fast = (planned(gbit, noise=None, strategies=asked) for gbit in (0.1, 100.0))
    assert of(slow, asked[1]).prediction.step_s < 0.7 * of(slow, asked[0]).prediction.step_s
    assert of(fast, asked[1]).prediction.step_s == of(fast, asked[0]).prediction.step_s
