"""The simulated network against textbook costs, worked by hand."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.description import Cluster, Compute, Hosts, Racks, Site
from paceline.cluster.placement import place
from paceline.comm.algorithms.chain import PIECE_BYTES
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.network import patterns
from paceline.engines.virtual.network.exchange import Exchange
from paceline.engines.virtual.network.links import Link, Network
from paceline.engines.virtual.network.wiring import Wiring
from paceline.errors import UsageError
from tests.unit.network_bench import B, Bench, M


def exchange_s(num_ranks: int, pattern: patterns.Pattern, *, latency_us: float = 0.0) -> float:
    """When the last rank is through, all having begun at once."""
    bench = Bench(num_ranks, latency_us=latency_us)
    done: list[int] = []
    exchange = Exchange(bench.network, range(num_ranks), pattern, done.append)
    for rank in range(num_ranks):
        exchange.join(rank)
    end_s = bench.run()
    assert sorted(done) == list(range(num_ranks))
    return end_s


# --- the timeline ----------------------------------------------------------------------------------------------------


def test_events_happen_in_order_of_time_then_of_asking() -> None:
    timeline, seen = EventQueue(), list[str]()
    timeline.at(2.0, seen.append, "c")
    timeline.at(1.0, lambda: (seen.append("a"), timeline.at(0.5, seen.append, "late, so now"))[0])
    timeline.at(1.0, seen.append, "b")
    timeline.run()
    assert seen == ["a", "b", "late, so now", "c"]
    assert timeline.now_s == 2.0


# --- single links ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latency_us", [0.0, 300.0, 80_000.0])
@pytest.mark.parametrize("unevenness", [0.0, 1.0])
@pytest.mark.parametrize("num_bytes", [0.0, 1.0, 2.0**20, 2.0**20 + 1, M])
def test_a_lone_message_takes_latency_and_size_over_bandwidth(
    num_bytes: float, unevenness: float, latency_us: float
) -> None:
    bench = Bench(2, latency_us=latency_us, unevenness=unevenness)
    bench.send(0, 1, num_bytes, "it")
    assert bench.run() == pytest.approx(latency_us * 1e-6 + num_bytes / B, rel=1e-9)


def test_the_least_bandwidth_of_a_path_counts_once() -> None:
    timeline = EventQueue()
    path = [Link("fast", 10 * B, 1e-3), Link("slow", B, 2e-3), Link("faster", 20 * B, 3e-3)]
    Network(timeline, lambda source, destination: path).send(0, 1, M, lambda: None)
    timeline.run()
    assert timeline.now_s == pytest.approx(6e-3 + M / B, rel=1e-9)


def test_two_directions_do_not_disturb_each_other() -> None:
    bench = Bench(2)
    bench.send(0, 1, M, "there")
    bench.send(1, 0, M, "back")
    assert bench.run() == pytest.approx(M / B)


def test_incast_shares_the_receivers_link() -> None:
    """Eight senders to one: each is done only when nearly all are."""
    bench = Bench(9)
    for sender in range(1, 9):
        bench.send(sender, 0, M, sender)
    assert bench.run() == pytest.approx(8 * M / B, rel=1e-9)
    assert min(bench.arrived.values()) > 0.98 * 8 * M / B  # type: ignore[type-var]


def test_a_sender_serves_hosts_in_turns_and_one_host_in_order() -> None:
    bench = Bench(3)
    bench.send(0, 1, M, "large")
    bench.send(0, 1, 1e3, "behind it")
    bench.send(0, 2, 1e6, "elsewhere")
    bench.run()
    assert bench.arrived["elsewhere"] == pytest.approx((2 * 2**20 + 1e6) / B, rel=1e-6)  # after two chunks
    assert bench.arrived["behind it"] > bench.arrived["large"] == pytest.approx((M + 1e6) / B, rel=1e-3)


def test_slow_senders_fill_a_fast_link_together() -> None:
    ups = [Link(f"up {number}", B) for number in range(30)]
    down = Link("down", 10 * B)
    timeline = EventQueue()
    network = Network(timeline, lambda source, destination: (ups[source], down))
    ends: list[float] = []
    for sender in range(30):
        network.send(sender, 99, M, lambda: ends.append(timeline.now_s))
    timeline.run()
    assert ends[-1] == pytest.approx(3 * M / B, rel=0.01)
    ends.clear()
    began_s = timeline.now_s
    for sender in range(5):
        network.send(sender, 99, M, lambda: ends.append(timeline.now_s))
    timeline.run()
    assert ends[-1] - began_s == pytest.approx(M / B, rel=1e-6)  # the receiver is no bottleneck


def test_answers_do_not_wait_behind_what_is_sent() -> None:
    for unevenness in (0.0, 0.3):
        bench = Bench(2, unevenness=unevenness)
        bench.send(0, 1, M, "push")
        bench.network.send(0, 1, 1e6, bench._note, "answer", is_answer=True)
        bench.run()
        assert bench.arrived["answer"] < 10e6 / B < bench.arrived["push"]


@given(
    messages=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3_000_000), st.floats(0, 0.05)), max_size=25
    ),
    unevenness=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=60, deadline=None)
def test_no_link_passes_more_than_it_can_and_order_is_kept(
    messages: list[tuple[int, int, int, float]], unevenness: float
) -> None:
    bench = Bench(5, latency_us=100.0, chunk_bytes=2**18, unevenness=unevenness)
    for number, (source, destination, num_bytes, begin_s) in enumerate(messages):
        name = (source, destination, number)
        bench.at(begin_s, lambda s=source, d=destination, b=num_bytes, n=name: bench.send(s, d, b, n))  # type: ignore[misc]
    bench.run()
    assert len(bench.arrived) == len(messages)
    for source, destination, number in bench.arrived:  # type: ignore[attr-defined]
        _, _, num_bytes, begin_s = messages[number]
        fastest_s = num_bytes / (20e9 if source == destination else B)
        assert bench.arrived[source, destination, number] >= begin_s + fastest_s
    for end in (0, 1):  # what one host sends, and what one receives, passes one card
        for host in range(5):
            mine = [m for m in messages if m[end] == host and m[0] != m[1]]
            times = [bench.arrived[n] for n in bench.arrived if n[end] == host and n[0] != n[1]]  # type: ignore[index]
            if mine:
                assert max(times) >= min(m[3] for m in mine) + sum(m[2] for m in mine) / B - 1e-9
    for source in range(5):
        for destination in range(5):
            sent = sorted((m[3], n) for n, m in enumerate(messages) if m[:2] == (source, destination))
            arrivals = [bench.arrived[source, destination, n] for _, n in sent]
            assert arrivals == sorted(arrivals)


# --- textbook costs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 20])
def test_ring(num_ranks: int) -> None:
    pattern = patterns.all_reduce([[rank] for rank in range(num_ranks)], M)
    expected_s = 2 * (num_ranks - 1) * (M / (num_ranks * B) + 50e-6)
    assert exchange_s(num_ranks, pattern, latency_us=50.0) == pytest.approx(expected_s, rel=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 5, 8])
def test_bruck_all_gather_is_minimal_in_rounds_and_bytes(num_ranks: int) -> None:
    pattern = patterns.all_gather(num_ranks, dict.fromkeys(range(num_ranks), M / num_ranks))
    expected_s = math.ceil(math.log2(num_ranks)) * 50e-6 + (num_ranks - 1) / num_ranks * M / B
    assert exchange_s(num_ranks, pattern, latency_us=50.0) == pytest.approx(expected_s, rel=1e-6)


@pytest.mark.parametrize(("num_ranks", "root"), [(2, 1), (5, 3), (8, 0), (9, 4)])
def test_small_broadcast_goes_down_a_binomial_tree(num_ranks: int, root: int) -> None:
    num_bytes = PIECE_BYTES
    expected_s = math.ceil(math.log2(num_ranks)) * (num_bytes / B + 50e-6)
    took_s = exchange_s(num_ranks, patterns.broadcast(num_ranks, root, num_bytes), latency_us=50.0)
    assert took_s == pytest.approx(expected_s, rel=1e-6)


@pytest.mark.parametrize(("num_ranks", "root"), [(2, 1), (5, 3), (8, 0), (9, 4)])
def test_large_broadcast_goes_along_a_chain(num_ranks: int, root: int) -> None:
    num_bytes = 40.5 * PIECE_BYTES
    expected_s = (num_bytes + (num_ranks - 2) * PIECE_BYTES) / B
    took_s = exchange_s(num_ranks, patterns.broadcast(num_ranks, root, num_bytes))
    assert took_s == pytest.approx(expected_s, rel=0.02)


@pytest.mark.parametrize("num_workers", [2, 5, 10])
def test_servers_on_workers_hosts_cost_what_a_ring_does(num_workers: int) -> None:
    """Each way: every worker gives (n - 1)/n of its gradients to the others' servers, or gets as much."""
    part = M / num_workers
    each = {rank: [part] * num_workers for rank in range(num_workers)}
    one_way_s = exchange_s(num_workers, patterns.all_to_all(num_workers, each))
    assert 2 * one_way_s == pytest.approx(2 * (num_workers - 1) * M / (num_workers * B), rel=0.01)


@pytest.mark.parametrize(("num_workers", "num_servers"), [(4, 1), (8, 2), (8, 8), (2, 4), (6, 4)])
def test_separate_servers(num_workers: int, num_servers: int) -> None:
    """Either way max(M/B, nM/(kB)): a worker's own link, or a server's."""
    expected_s = max(M / B, num_workers * M / (num_servers * B))
    for is_push in (True, False):
        bench = Bench(num_workers + num_servers, chunk_bytes=2**16)
        for worker in range(num_workers):
            for server in range(num_workers, num_workers + num_servers):
                ends = (worker, server) if is_push else (server, worker)
                bench.send(*ends, M / num_servers, ends)
        assert bench.run() == pytest.approx(expected_s, rel=0.01)


@pytest.mark.parametrize("is_paced", [True, False])
@pytest.mark.parametrize(("num_workers", "num_servers"), [(4, 1), (4, 2), (8, 3), (8, 7)])
def test_best_split_among_servers_with_and_without_workers(num_workers: int, num_servers: int, is_paced: bool) -> None:
    """2n(n-1)M / ((n^2 + kn - 2k)B), when servers on workers' hosts hold less than those on k further hosts.

    Jiang et al., "A unified architecture for accelerating distributed DNN training in heterogeneous GPU/CPU clusters"
    (BytePS), OSDI 2020, section 4.1. Every link then carries as much, so that workers who push at that rate are
    answered at that rate, and nothing makes it faster.
    """
    n, k = num_workers, num_servers
    denominator = n * n + k * n - 2 * k
    shares = [(n - k) * M / denominator] * n + [2 * (n - 1) * M / denominator] * k
    assert sum(shares) == pytest.approx(M)
    expected_s = 2 * n * (n - 1) * M / (denominator * B)
    bench = Bench(n + k)
    num_pieces = 300
    missing: dict[tuple[int, int], int] = {}

    def arrive(server: int, number: int) -> None:
        """A piece of some worker's gradients is here; once all have come, every worker gets the sum."""
        missing[server, number] = missing.get((server, number), n) - 1
        if not missing[server, number]:
            for worker in range(n):
                if worker != server:
                    bench.send(server, worker, shares[server] / num_pieces, (server, worker, number))

    def push(number: int) -> None:
        for worker in range(n):
            for server, share in enumerate(shares):
                if server == worker:
                    arrive(server, number)
                else:
                    bench.network.send(worker, server, share / num_pieces, arrive, server, number)

    for number in range(num_pieces):
        bench.timeline.at(number / num_pieces * expected_s if is_paced else 0.0, push, number)
    took_s = bench.run()
    assert took_s >= 0.999 * expected_s
    assert not is_paced or took_s == pytest.approx(expected_s, rel=0.01)


def test_hierarchical_exchange_crosses_the_network_once_a_host() -> None:
    """Three hosts with four workers each: a ring of three, and memory twice as often as workers give and get."""
    cluster = Cluster(
        hosts=(Hosts(count=3, workers=4, bandwidth_gbit_per_s=1.0, latency_us=0.0, memory_gbyte_per_s=10.0),),
        compute=Compute(step_s=1.0),
    )
    timeline, topology = EventQueue(), Wiring(cluster)
    places = place(cluster, num_workers=12, num_servers=0)
    network = Network(timeline, topology)
    pattern = patterns.all_reduce(places.ranks_by_host, M)
    exchange = Exchange(network, places.workers, pattern, lambda rank: None)
    for rank in range(12):
        exchange.join(rank)
    timeline.run()
    in_memory_s = 3 * M / 10e9
    assert timeline.now_s == pytest.approx(2 * in_memory_s + 4 * M / (3 * B), rel=1e-3)


def test_an_oversubscribed_rack_and_core_are_the_bottleneck() -> None:
    racks = Racks(hosts=4, bandwidth_gbit_per_s=2.0, latency_us=0.0, core_gbit_per_s=1.0)
    cluster = Cluster(
        hosts=(Hosts(count=8, bandwidth_gbit_per_s=1.0, latency_us=0.0),), racks=racks, compute=Compute(step_s=1.0)
    )
    without_core = Cluster(
        hosts=cluster.hosts,
        racks=Racks(hosts=4, bandwidth_gbit_per_s=2.0, latency_us=0.0),
        compute=cluster.compute,
    )
    for each, factor in ((cluster, 4), (without_core, 2)):
        timeline = EventQueue()
        network = Network(timeline, Wiring(each))
        for host in range(4):
            network.send(host, host + 4, M, lambda: None)
        timeline.run()
        assert timeline.now_s == pytest.approx(factor * M / B, rel=0.02)


def test_sites_are_far_apart() -> None:
    cluster = Cluster(
        hosts=(
            Hosts(name="a", count=2, bandwidth_gbit_per_s=1.0, latency_us=0.0, site="here"),
            Hosts(name="b", count=2, bandwidth_gbit_per_s=1.0, latency_us=0.0, site="there"),
        ),
        sites=(
            Site(name="here", bandwidth_gbit_per_s=1.0, latency_ms=10.0),
            Site(name="there", bandwidth_gbit_per_s=0.5, latency_ms=30.0),
        ),
        compute=Compute(step_s=1.0),
    )
    bench = Bench(1)
    bench.network = Network(bench.timeline, Wiring(cluster))
    bench.send(0, 2, M, "across")
    bench.send(0, 1, 1.0, "near")
    bench.run()
    assert bench.arrived["across"] == pytest.approx(0.04 + 2 * M / B, rel=0.01)
    assert bench.arrived["near"] < 0.02


# --- bursts and messages ---------------------------------------------------------------------------------------------


def bursting(num_hosts: int, burst_bytes: float) -> Bench:
    hosts = Hosts(count=num_hosts, bandwidth_gbit_per_s=1.0, latency_us=0.0, burst_kbyte=burst_bytes / 1e3)
    bench = Bench(1)
    bench.network = Network(bench.timeline, Wiring(Cluster(hosts=(hosts,), compute=Compute(step_s=1.0))))
    return bench


def test_a_token_bucket_lets_what_it_holds_pass_at_once() -> None:
    bench = bursting(2, 1e6)
    for number in range(4):
        bench.send(0, 1, 0.5e6, number)
    bench.run()
    assert [bench.arrived[number] for number in range(4)] == pytest.approx([0.0, 0.0, 0.5e6 / B, 1e6 / B])


def test_a_token_bucket_fills_at_the_links_rate() -> None:
    bench = bursting(2, 1e6)
    bench.send(0, 1, 2e6, "first")
    bench.at(1e6 / B + 0.4e6 / B, lambda: bench.send(0, 1, 1e6, "half full"))
    bench.at(1.0, lambda: bench.send(0, 1, 1.5e6, "full"))
    bench.run()
    assert bench.arrived["first"] == pytest.approx(1e6 / B)
    assert bench.arrived["half full"] == pytest.approx(2e6 / B)
    assert bench.arrived["full"] == pytest.approx(1.0 + 0.5e6 / B)


def test_bursts_of_many_senders_meet_one_bucket() -> None:
    bench = bursting(5, 1e6)
    for sender in range(1, 5):
        bench.send(sender, 0, 1e6, sender)
    assert bench.run() == pytest.approx(3e6 / B)


# --- places and size -------------------------------------------------------------------------------------------------


def test_places() -> None:
    cluster = Cluster(
        hosts=(
            Hosts(name="gpu", count=2, devices=2, bandwidth_gbit_per_s=1.0),
            Hosts(name="cpu", count=1, workers=0, bandwidth_gbit_per_s=1.0),
            Hosts(name="old", count=2, bandwidth_gbit_per_s=1.0),
        ),
        compute=Compute(step_s=1.0),
    )
    places = place(cluster, num_workers=5, num_servers=2)
    assert places.workers == (0, 0, 1, 1, 3)
    assert places.servers == (2, 4)
    assert places.ranks_by_host == [[0, 1], [2, 3], [4]]
    with pytest.raises(UsageError, match=r"room for 6 worker\(s\), not 7"):
        place(cluster, num_workers=7, num_servers=0)
    with pytest.raises(UsageError, match=r'3 server\(s\) need hosts of their own.*placement = "with workers"'):
        place(cluster, num_workers=5, num_servers=3)


@pytest.mark.slow
def test_ten_thousand_workers_are_quick() -> None:
    """What a planner needs: ten times the workers take ten times as long, or a little more; a hundred times would not
    do."""
    few_s = min(simulating_s(1_000) for _ in range(3))
    assert simulating_s(10_000) < 60 * few_s


def simulating_s(num_workers: int) -> float:
    """Processor time of a push and a pull of each worker to 100 servers, whole messages, 5 times."""
    num_servers, num_steps = 100, 5
    bench = Bench(num_workers + num_servers, chunk_bytes=math.inf)
    left = [num_steps] * num_workers
    hosts: Sequence[int] = range(num_workers)

    def push(worker: int) -> None:
        bench.network.send(worker, num_workers + worker % num_servers, 1e4, pull, worker)

    def pull(worker: int) -> None:
        bench.network.send(num_workers + worker % num_servers, worker, 1e4, again, worker)

    def again(worker: int) -> None:
        left[worker] -= 1
        if left[worker]:
            push(worker)

    began_s = time.process_time()
    for worker in hosts:
        push(worker)
    assert bench.run() == pytest.approx(num_steps * num_workers / num_servers * 1e4 / B, rel=0.25)
    assert not any(left)
    return time.process_time() - began_s
