"""Cluster files: what they say, and what is said of bad ones; and the compute times that they describe."""

from __future__ import annotations

import math
import statistics
from functools import partial

import pytest

from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.cluster.placement import place
from paceline.cluster.reading import load, parse, shipped
from paceline.cluster.writing import as_toml
from paceline.engines.virtual.computing.durations import ComputeTimes, StepCost
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.network.wiring import Wiring
from paceline.engines.virtual.survival.lives import Lives
from paceline.errors import UsageError

GOOD = """about = "two kinds of hosts"

[[hosts]]
name = "new"
count = 3
bandwidth_gbit_per_s = 10

[[hosts]]
name = "old"
speed = 0.5
bandwidth_gbit_per_s = 1.0
latency_us = 80

[compute]
step_s = 0.2
distribution = "trace"
trace_s = [0.1, 0.2, 0.3]

[servers]
placement = "with workers"
"""


def test_a_file_is_read() -> None:
    cluster = parse(GOOD, where="it")
    assert [hosts.name for hosts in cluster.hosts] == ["new", "old"]
    assert cluster.names() == ["new-0", "new-1", "new-2", "old-0"]
    assert cluster.hosts[0].bandwidth_gbit_per_s == 10.0
    assert cluster.compute == Compute(step_s=0.2, distribution="trace", trace_s=(0.1, 0.2, 0.3))
    assert cluster.servers.placement == "with workers"
    assert cluster.racks is None


@pytest.mark.parametrize("name", shipped())
def test_shipped_clusters_have_room_for_their_servers(name: str) -> None:
    cluster = load(name)
    assert cluster.about
    places = place(cluster, num_workers=20, num_servers=4)
    assert len(set(places.servers)) == 4
    if cluster.num_hosts < 1000:
        path = Wiring(cluster)(places.workers[-1], places.servers[0])
        assert all(link.bytes_per_s > 0 for link in path)


def test_shipped_names_are_those_promised() -> None:
    assert set(shipped()) == {
        "commodity-10gbe",
        "data-centre-10000",
        "lab-1gbe",
        "laptops-wifi",
        "published",
        "spot-10gbe",
        "volunteers",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("speed", "sped"), r"it, line 10: unknown key 'sped'; did you mean 'speed'\?"),
        (("[servers]", "[server]"), r"it, line 19: unknown key 'server'; did you mean 'servers'\?"),
        (("count = 3", "count = 0"), r"it, line 5: count must be at least 1, not 0"),
        (("count = 3", "count = 2.5"), r"it, line 5: count must be a whole number, not 2.5: how many there are"),
        (("count = 3", 'count = "3"'), r"it, line 5: count must be a whole number, not '3'"),
        (("bandwidth_gbit_per_s = 1.0", "bandwidth_gbit_per_s = 0"), r"line 11: bandwidth_gbit_per_s must be above 0"),
        (("bandwidth_gbit_per_s = 10\n", "\n"), r"it, line 3: bandwidth_gbit_per_s is missing: of the network card"),
        (('"trace"', '"normal"'), r'it, line 16: distribution must be one of "constant", "log-normal".*not \'normal\''),
        (('"trace"', '"log-normal"'), r"it, line 14: variation goes with distribution"),
        (("[0.1, 0.2, 0.3]", "[0.1, -0.2]"), r"it, line 14: trace_s must be times above 0"),
        (("[0.1, 0.2, 0.3]", "0.1"), r"it, line 17: trace_s must be a list"),
        (("step_s = 0.2", "step_s = 0.2\nsample_s = 1"), r"it, line 14: step_s and sample_s say the same"),
        (("speed = 0.5", 'site = "moon"'), r"it, line 1: hosts 'old' are at site 'moon', which is none of"),
        (("[compute]", "[compute"), r"it is not TOML: .*line 14"),
        (('step_s = 0.2\ndistribution = "trace"\ntrace_s = [0.1, 0.2, 0.3]', ""), r"give step_s or sample_s in"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_line(change: tuple[str, str], message: str) -> None:
    assert change[0] in GOOD
    with pytest.raises(UsageError, match=message):
        parse(GOOD.replace(*change), where="it")


def test_a_cluster_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"cannot read the cluster publishd: .*did you mean 'published'\?"):
        load("publishd")


# --- compute times ---------------------------------------------------------------------------------------------------


def draws(compute: Compute, *, count: int = 20_000, rank: int = 0, seed: int = 1) -> list[float]:
    times = ComputeTimes(compute, seed=seed, rank=rank)
    return [times.draw(0.5) for _ in range(count)]


def test_constant_times_are_constant() -> None:
    assert set(draws(Compute(step_s=1.0), count=10)) == {0.5}


def test_distributions_have_their_mean_and_spread() -> None:
    log_normal = draws(Compute(step_s=1.0, distribution="log-normal", variation=0.4))
    assert statistics.mean(log_normal) == pytest.approx(0.5, rel=0.02)
    assert statistics.stdev(log_normal) == pytest.approx(0.2, rel=0.05)
    exponential = draws(Compute(step_s=1.0, distribution="exponential"))
    assert statistics.mean(exponential) == pytest.approx(0.5, rel=0.03)
    assert statistics.median(exponential) == pytest.approx(0.5 * math.log(2), rel=0.04)


def test_a_trace_is_gone_through_from_a_place_of_each_workers_own() -> None:
    compute = Compute(distribution="trace", trace_s=(1.0, 2.0, 3.0, 2.0))
    assert compute.reference_s == 2.0
    sequences = {tuple(draws(compute, count=4, rank=rank)) for rank in range(20)}
    assert len(sequences) > 1
    assert {tuple(sorted(sequence)) for sequence in sequences} == {(0.25, 0.5, 0.5, 0.75)}


def test_pauses_come_at_their_rate_of_computing() -> None:
    """7,200 an hour are 2 in a second, of 0.1 s each: 0.5 s of computing take 0.6 s on the average."""
    paused = draws(Compute(step_s=1.0, pauses_per_hour=7200.0, pause_s=0.1))
    assert statistics.mean(paused) == pytest.approx(0.6, rel=0.01)
    assert {round((time_s - 0.5) / 0.1, 6) for time_s in paused} >= {0.0, 1.0, 2.0, 3.0}


def test_draws_are_each_workers_own_and_the_same_every_time() -> None:
    compute = Compute(step_s=1.0, distribution="exponential")
    first = [draws(compute, count=5, rank=rank) for rank in range(3)]
    assert first == [draws(compute, count=5, rank=rank) for rank in range(3)]
    assert len({time_s for sequence in first for time_s in sequence}) == 15
    assert first[0] != draws(compute, count=5, seed=2)


def cost(hosts: Hosts, compute: Compute, *, num_sharing: int = 1) -> StepCost:
    return StepCost(Cluster(hosts=(hosts,), compute=compute), hosts, num_sharing=num_sharing)


def test_costs_follow_samples_speed_and_who_shares_a_host() -> None:
    host = Hosts(bandwidth_gbit_per_s=1.0, speed=2.0, cores=8, gflop_per_s=5.0)
    by_step = cost(host, Compute(step_s=1.0))
    assert by_step.seconds(num_samples=100, forward_flop=0.0) == 0.5
    assert by_step.seconds(num_samples=10, forward_flop=0.0) == 0.05  # the short batch at an epoch's end
    evaluated_before = cost(host, Compute(step_s=1.0))
    assert evaluated_before.seconds(num_samples=5000, forward_flop=0.0, is_training=False) == 0.5
    assert evaluated_before.seconds(num_samples=100, forward_flop=0.0) == 0.5  # the step that step_s speaks of
    assert evaluated_before.seconds(num_samples=5000, forward_flop=0.0, is_training=False) == 25.0
    assert cost(host, Compute(sample_s=0.01)).seconds(num_samples=100, forward_flop=0.0) == 0.5
    assert cost(host, Compute(step_s=1.0), num_sharing=4).seconds(num_samples=1, forward_flop=0.0) == 2.0
    counted = Compute(backward_share=0.75)
    # 10 GFLOP forward are 40 in all, on 8 cores of 5 GFLOP/s, twice as fast as said.
    assert cost(host, counted).seconds(num_samples=1, forward_flop=10e9) == pytest.approx(0.5)
    devices = Hosts(bandwidth_gbit_per_s=1.0, devices=2, cores=8, gflop_per_s=5.0)
    for num_sharing, seconds in ((1, 8.0), (2, 8.0), (4, 16.0)):
        found = cost(devices, counted, num_sharing=num_sharing).seconds(num_samples=1, forward_flop=10e9)
        assert found == pytest.approx(seconds)


def test_a_framework_takes_a_core_s_time_for_each_call_whatever_the_batch() -> None:
    host = Hosts(bandwidth_gbit_per_s=1.0, speed=2.0, cores=2, gflop_per_s=5.0)
    compute = Compute(dispatch_us=30.0, backward_share=0.75)
    for num_samples, flop in ((1, 10e6), (10, 100e6)):
        found = cost(host, compute).seconds(num_samples=num_samples, forward_flop=flop, forward_calls=100)
        assert found == pytest.approx(4 * flop / 20e9 + 100 * 30e-6 / 2)
    four = cost(host, compute, num_sharing=4).seconds(num_samples=1, forward_flop=0.0, forward_calls=100)
    assert four == pytest.approx(2 * 100 * 30e-6 / 2), "four workers on two cores"
    with pytest.raises(UsageError, match="dispatch_us counts where operations are counted"):
        Compute(dispatch_us=30.0, step_s=0.1)


def fates(cluster: Cluster, *, until_s: float) -> list[tuple[str, float, int]]:
    """What happens to its hosts: what, when, and to which."""
    timeline, found = EventQueue(), []

    def note(what: str, host: int, *_: float) -> None:
        found.append((what, timeline.now_s, host))

    told = {f"on_{what}": partial(note, what) for what in ("notice", "gone", "back")}
    Lives(cluster, timeline, seed=0, **told).begin(range(cluster.num_hosts))
    timeline.at(until_s, timeline.stop)
    timeline.run()
    return found


def test_hosts_fail_are_taken_away_and_come_back_at_their_rates() -> None:
    hosts = Hosts(count=40, bandwidth_gbit_per_s=1.0, back_after_s=100.0, preemptions_per_hour=18.0, notice_s=50.0)
    cluster = Cluster(hosts=(hosts,), compute=Compute(step_s=1.0, failures_per_hour=18.0))
    found = fates(cluster, until_s=40_000.0)
    assert found == fates(cluster, until_s=40_000.0)
    at = {what: [(time_s, host) for kind, time_s, host in found if kind == what] for what in ("notice", "gone", "back")}
    # Either in 200 s on average, and 50 s later for the one with notice.
    life_s = 200 * (1 - math.exp(-50 / 200)) + 100 * math.exp(-50 / 200)
    assert len(at["gone"]) == pytest.approx(40 * 40_000 / (life_s + 100), rel=0.03)
    assert [host for _, host in at["back"]] == [host for _, host in at["gone"][: len(at["back"])]]
    for (back_s, _), (gone_s, _) in zip(at["back"], at["gone"], strict=False):
        assert back_s == pytest.approx(gone_s + 100)
    assert len(at["notice"]) == pytest.approx(len(at["gone"]) / 2, rel=0.05)
    assert fates(Cluster(hosts=(Hosts(bandwidth_gbit_per_s=1.0),), compute=Compute(step_s=1.0)), until_s=1e9) == []


def test_what_is_said_of_spot_hosts_is_refused_without_preemptions() -> None:
    for key, value in {"notice_s": 30.0, "spot_price_per_hour": 0.3}.items():
        text = f"[[hosts]]\nbandwidth_gbit_per_s = 1\n{key} = {value}\n[compute]\nstep_s = 1.0\n"
        with pytest.raises(UsageError, match=f"line 1: {key} is of .*preemptions_per_hour"):
            parse(text, where="it")
        good = parse(text.replace("[compute]", "preemptions_per_hour = 0.1\n[compute]"), where="it")
        assert parse(as_toml(good), where="again") == good


@pytest.mark.parametrize("line", ["back_after_s = -1", "price_per_hour = 'two'", "preemption_per_hour = 1"])
def test_nonsense_about_failures_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match=f"it, line 3: .*{line.split(' ')[0]}"):
        parse(f"[[hosts]]\nbandwidth_gbit_per_s = 1\n{line}\n[compute]\nstep_s = 1.0\n", where="it")
