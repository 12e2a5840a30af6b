"""Probing without a cluster: what is timed, what is made of it, and the file that comes out."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.comm.wire import Keys
from paceline.engines.virtual.cluster import Cluster, Communication, Compute, Hosts, Racks, Servers, Site
from paceline.engines.virtual.cluster_file import load, parse, shipped
from paceline.engines.virtual.cluster_writing import as_toml
from paceline.errors import BudgetReached, RunFailed, UsageError
from paceline.probing import network, probe, steps
from paceline.probing.echo import Echo
from paceline.probing.exchanging import ExchangeCost, Exchanges
from paceline.probing.fitting import ASSUMED_INCAST, MOST_HANDLING, HostFacts, fit
from paceline.probing.network import NetworkReport, PairReport
from paceline.probing.sharing import (
    answered,
    connected,
    logarithms_of_shares,
    measure_unevenness,
)
from paceline.probing.sharing import (
    unevenness_of as unevenness_of_counts,
)
from paceline.probing.steps import StepReport, StepWatch
from paceline.probing.timing import mean_s
from paceline.records import NullReporter
from paceline.strategies.replica import describe

# --- steps -----------------------------------------------------------------------------------------------------------


class Clock:
    """Moves on only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def take(self, duration_s: float) -> None:
        self.now_s += duration_s


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, backward_s: float) -> Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.take(ctx.backward_s)
        return gradient, None, None


class Layer(nn.Module):
    """A scale whose gradient is there once its backward time is over."""

    def __init__(self, clock: Clock, *, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._clock, self._forward_s, self._backward_s = clock, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        self._clock.take(self._forward_s)
        scaled: Tensor = _Timed.apply(x * self.weight, self._clock, self._backward_s)
        return scaled


def watched(watch: StepWatch, clock: Clock, *, num_steps: int, num_passes: int = 1, asleep_s: float = 0.0) -> None:
    """Steps of 0.5 s batch, 1 + 1 s forward, 2 + 0.5 s backward and 0.5 s optimizer: 3 s and 2.5 s."""
    model = nn.Sequential(Layer(clock, forward_s=1.0, backward_s=0.5), Layer(clock, forward_s=1.0, backward_s=2.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: clock.take(0.5))
    watch.watch(describe(model, optimizer))
    for _ in range(num_steps):
        for _ in range(num_passes):
            clock.take(0.5 + asleep_s)
            watch.slept(asleep_s)
            model(torch.ones(1, requires_grad=True)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1))  # an evaluation takes time, and is no pass
            clock.take(-2.0)
        optimizer.step()


@pytest.mark.parametrize("asleep_s", [0.0, 100.0])
def test_a_step_is_divided_as_it_was_spent(asleep_s: float) -> None:
    clock = Clock()
    watch = StepWatch(num_steps=100, max_s=1e9, now_s=clock)
    watched(watch, clock, num_steps=8, asleep_s=asleep_s)
    report = watch.report("10.0.0.1")
    assert report.address == "10.0.0.1"
    assert report.steps_s == pytest.approx([5.5] * 5)  # of 8, one starts the watch and two warm up
    assert report.backward_share == pytest.approx(2.5 / 5.5)
    assert report.gradient_shares == pytest.approx((0.2, 0.8))  # the last layer's gradient comes first, after 2 s


def test_accumulated_passes_count_by_themselves() -> None:
    clock = Clock()
    watch = StepWatch(num_steps=100, max_s=1e9, now_s=clock)
    watched(watch, clock, num_steps=6, num_passes=4)
    report = watch.report("it")
    assert report.steps_s == pytest.approx([(4 * 5 + 0.5) / 4] * 3)
    assert report.backward_share == pytest.approx(10 / 20.5)


def test_enough_ends_the_script() -> None:
    by_count, by_time = (Clock(), Clock())
    watch = StepWatch(num_steps=7, max_s=1e9, now_s=by_count)
    with pytest.raises(BudgetReached):
        watched(watch, by_count, num_steps=100)
    assert by_count.now_s == pytest.approx(8 * 5.5)
    watch = StepWatch(num_steps=1000, max_s=20.0, now_s=by_time)
    with pytest.raises(BudgetReached):
        watched(watch, by_time, num_steps=100)
    assert by_time.now_s == pytest.approx(5.5 + 4 * 5.5)  # the first that ends 20 s after the watch began


def test_too_few_steps_are_refused() -> None:
    clock = Clock()
    watch = StepWatch(num_steps=100, max_s=1e9, now_s=clock)
    watched(watch, clock, num_steps=3)
    with pytest.raises(UsageError, match=r"took 2 training step\(s\), and probing needs at least 3; have it train"):
        watch.report("it")


# --- pairs -----------------------------------------------------------------------------------------------------------


@given(st.integers(2, 24))
def test_every_pair_meets_once_and_nobody_is_in_two_pairs_at_a_time(count: int) -> None:
    found = network.rounds(count)
    pairs = [pair for each in found for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for each in found:
        players = [player for pair in each for player in pair]
        assert len(set(players)) == len(players)
    assert len(found) == count - 1 + count % 2


# --- fitting ---------------------------------------------------------------------------------------------------------


def pair(source: int, destination: int, **changes: float) -> PairReport:
    numbers = {
        "latency_s": 50e-6,
        "message_s": 80e-6,
        "bytes_per_s": 125e6,
        "pushed_bytes_per_s": 120e6,
        "piece_s": 20e-3,
        "message_core_s": 20e-6,
    }
    cost = {"request_s": 300e-6, "request_core_s": 180e-6, "bytes_per_core_s": 4e8}
    changed = {**numbers, **cost, **changes}
    exchange = ExchangeCost(**{name: changed.pop(name) for name in cost})
    return PairReport(source, destination, exchange=exchange, **changed)


def reports(count: int, changes: dict[tuple[int, int], dict[str, float]] | None = None) -> list[NetworkReport]:
    changes = changes or {}
    return [
        NetworkReport(
            address=f"10.0.0.{rank}",
            rank=rank,
            pairs=tuple(pair(rank, other, **changes.get((rank, other), {})) for other in range(count) if other != rank),
            packing_bytes_per_s=5e8,
            operation_s=1e-3,
            shared_bytes_per_s=2e9,
            memory_bytes_per_s=8e9,
        )
        for rank in range(count)
    ]


def taken(*means_s: float, shares: tuple[float, ...] = (0.25, 0.75)) -> list[StepReport]:
    spread = (0.9, 1.0, 1.1)
    return [
        StepReport(f"10.0.0.{rank}", tuple(mean_s * factor for factor in spread), 0.6, shares)
        for rank, mean_s in enumerate(means_s)
    ]


def facts(count: int, cores: Sequence[float] = ()) -> list[HostFacts]:
    return [HostFacts(f"10.0.0.{rank}", cores[rank] if cores else 4.0, 0.0) for rank in range(count)]


def test_alike_hosts_are_one_table_with_every_number_worked_by_hand() -> None:
    cluster = fit(facts(3), taken(0.2, 0.2, 0.2), reports(3), about="it")
    (hosts,) = cluster.hosts
    assert hosts == Hosts(
        name="host", count=3, cores=4, bandwidth_gbit_per_s=1.0, latency_us=50.0, memory_gbyte_per_s=8.0
    )
    assert cluster.compute.step_s == 0.2
    assert cluster.compute.backward_share == 0.6
    assert cluster.compute.trace_s == pytest.approx((0.18, 0.2, 0.22) * 3)
    assert cluster.compute.gradient_shares == (0.25, 0.75)
    # 300 us there and back, of which 100 us are the way: 100 us at each end.
    assert cluster.communication.request_us == cluster.servers.request_us == pytest.approx(100.0)
    assert cluster.communication.message_us == pytest.approx(30.0)
    assert cluster.communication.message_core_us == pytest.approx(20.0)
    assert cluster.communication.request_core_us == pytest.approx(180.0)
    assert cluster.communication.operation_us == pytest.approx(1000.0 - 4 * 50.0)  # a ring of three has four rounds
    assert cluster.communication.packing_gbyte_per_s == 0.5
    assert cluster.communication.exchange_gbyte_per_s == 0.4
    assert cluster.servers.placement == "with workers"


def test_a_slow_host_and_a_slow_card_get_tables_of_their_own() -> None:
    slow = {"bytes_per_s": 25e6, "pushed_bytes_per_s": 20e6}
    changes = dict.fromkeys([(0, 2), (1, 2), (2, 0), (2, 1), (3, 2), (2, 3)], slow)
    cluster = fit(facts(4), taken(0.1, 0.1, 0.1, 0.2), reports(4, changes), about="it")
    assert [(h.count, h.speed, h.bandwidth_gbit_per_s) for h in cluster.hosts] == [
        (2, 1.0, 1.0),
        (1, 1.0, 0.2),
        (1, 0.5, 1.0),
    ]
    assert len({hosts.name for hosts in cluster.hosts}) == 3
    assert cluster.compute.step_s == pytest.approx(0.1)
    # Every host's steps at the pace of the middle one, so that speed counts once.
    assert cluster.compute.trace_s == pytest.approx((0.09, 0.1, 0.11) * 4)


def test_sending_slower_than_receiving_is_told_apart() -> None:
    slow = {"bytes_per_s": 12e6, "pushed_bytes_per_s": 12.5e6}  # the better of the two is what the way carries
    changes = {(0, other): slow for other in (1, 2)}
    cluster = fit(facts(3), taken(1, 1, 1), reports(3, changes), about="it")
    assert [(h.count, h.bandwidth_gbit_per_s, h.up_gbit_per_s) for h in cluster.hosts] == [
        (1, 1.0, 0.1),
        (2, 1.0, None),
    ]


def test_one_host_has_room_for_a_worker_a_core() -> None:
    cluster = fit(facts(1), taken(0.1), reports(2), about="it")
    (hosts,) = cluster.hosts
    assert (hosts.count, hosts.cores, hosts.workers) == (1, 4, 4)
    assert hosts.memory_gbyte_per_s == 4.0  # what workers exchange, up and back, is slower than updates
    assert cluster.communication.packing_gbyte_per_s is None
    assert cluster.communication.exchange_gbyte_per_s is None
    assert cluster.num_slots == 4


def test_waking_up_for_packets_of_a_slow_link_is_not_what_busy_cores_do() -> None:
    changes = {way: {"bytes_per_core_s": 1e7} for way in ((0, 1), (1, 0))}
    cluster = fit(facts(2), taken(1.0, 1.0), reports(2, changes), about="it")
    assert cluster.communication.exchange_gbyte_per_s == 0.5 / MOST_HANDLING


def test_an_exchange_takes_no_less_than_packing() -> None:
    changes = {way: {"bytes_per_core_s": 1e16} for way in ((0, 1), (1, 0))}
    cluster = fit(facts(2), taken(1.0, 1.0), reports(2, changes), about="it")
    assert cluster.communication.exchange_gbyte_per_s == 0.5


def unevenness_of(between: Sequence[float | None], incast: float | None) -> float:
    """What is made of that between hosts, as each measured it, and from several to one, as all did."""
    count = len(between)
    found = [
        dataclasses.replace(report, unevenness=each, incast_unevenness=incast)
        for report, each in zip(reports(count), between, strict=True)
    ]
    return fit(facts(count), taken(*[1.0] * count), found, about="it").communication.unevenness


def test_links_are_as_uneven_as_hosts_found_them() -> None:
    assert unevenness_of([0.2, 0.3, None, 0.7], incast=0.1) == 0.3  # the middle one
    assert unevenness_of([0.2, 0.3, None, 0.7], incast=0.4) == 0.4
    assert unevenness_of([0.01, None, 0.02], incast=0.04) == 0.0  # hardly uneven


def test_two_hosts_are_taken_to_be_as_uneven_as_several_were_found_elsewhere() -> None:
    assert unevenness_of([0.02, None], incast=None) == ASSUMED_INCAST
    assert unevenness_of([None, None], incast=None) == ASSUMED_INCAST
    assert unevenness_of([0.5, 0.7], incast=None) == 0.6


def test_what_a_link_lets_pass_at_once_is_what_a_piece_was_ahead_of_its_rate() -> None:
    """A piece of 1 MiB takes 8.4 ms at 1 Gbit/s, and 4.2 ms to be packed and unpacked."""
    piece_s, packing_s = 2**20 / 125e6, 2 * 2**20 / 5e8

    def burst_kbyte(ahead_s: float) -> float:
        alone_s = piece_s + packing_s - ahead_s
        changes = {way: {"piece_s": alone_s} for way in ((0, 1), (1, 0))}
        (hosts,) = fit(facts(2), taken(1.0, 1.0), reports(2, changes), about="it").hosts
        return hosts.burst_kbyte

    assert burst_kbyte(5e-3) == pytest.approx(625.0)
    assert burst_kbyte(20e-3) == pytest.approx(1049.0)  # no more than was sent
    assert burst_kbyte(0.5e-3) == burst_kbyte(-3e-3) == 0.0


def test_shares_by_hand() -> None:
    assert logarithms_of_shares([10, 10, 10]) == [0.0, 0.0, 0.0]
    assert logarithms_of_shares([20, 0, 10]) == pytest.approx([math.log(2), math.log(0.02), 0.0])


def test_too_few_pieces_say_nothing() -> None:
    assert unevenness_of_counts([[100, 50], [50, 100]]) == pytest.approx(math.log(2) / 2, rel=1e-6)
    assert unevenness_of_counts([[100, 50], [10, 9]]) is None


def test_connections_to_one_listener_are_all_counted() -> None:
    keys = Keys.generate()
    echo = Echo(keys, host="127.0.0.1")
    try:
        assert 0 <= measure_unevenness(keys, echo.endpoint, name="it") < 3
        with connected(keys, echo.endpoint, ["one", "two"]) as callers:
            assert min(answered(callers)) > 0
        assert answered([]) == []  # of the host that all others push to
    finally:
        echo.close()


def test_two_ranks_exchange_with_each_others_servers() -> None:
    """Both at the same time, as in a run whose servers are on workers' hosts; nothing of it stays."""
    keys = Keys.generate()
    mine, theirs = SimpleQueue[str](), SimpleQueue[str]()
    before = {thread.name for thread in threading.enumerate()}

    def swap_with(outgoing: SimpleQueue[str], incoming: SimpleQueue[str], text: str) -> str:
        outgoing.put(text)
        return incoming.get(timeout=60)

    def one(outgoing: SimpleQueue[str], incoming: SimpleQueue[str]) -> ExchangeCost:
        swap = partial(swap_with, outgoing, incoming)
        return Exchanges(swap, keys, "127.0.0.1", NullReporter(), num_sharing=2).measure()

    with ThreadPoolExecutor(2) as pool:
        costs = [future.result() for future in (pool.submit(one, mine, theirs), pool.submit(one, theirs, mine))]
    for cost in costs:
        assert 0 < cost.request_core_s < 1.0
        assert 0 < cost.request_s < 1.0
        assert cost.bytes_per_core_s > 1e6
    assert {thread.name for thread in threading.enumerate()} <= before


def test_a_mean_leaves_the_extremes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten times the shortest and the longest: a hiccup of the machine is not what a message takes."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    durations_s = iter([0.0, 30.0, *[1.0] * 4, *[3.0] * 4])
    assert mean_s(lambda: clock.take(next(durations_s)), 10) == pytest.approx(2.0)


positive = st.floats(1e-6, 1e6)


@given(
    means_s=st.lists(st.floats(1e-4, 100.0), min_size=1, max_size=5),
    noise=st.lists(positive, min_size=8, max_size=8),
    shares=st.lists(st.floats(0.01, 1.0), max_size=6),
)
@settings(deadline=None)
def test_whatever_was_measured_makes_a_file_that_is_read_back_as_it_was(
    means_s: list[float], noise: list[float], shares: list[float]
) -> None:
    names = ("latency_s", "message_s", "request_s", "bytes_per_s", "pushed_bytes_per_s", "piece_s", "message_core_s")
    count = max(2, len(means_s))
    changes = {
        (a, b): {name: noise[(a + b + i) % 8] for i, name in enumerate(names)}
        for a in range(count)
        for b in range(count)
    }
    whole = sum(shares)
    cluster = fit(
        facts(len(means_s)),
        taken(*means_s, shares=tuple(share / whole for share in shares)),
        reports(count, changes),
        about='with "quotes", \\ and\nlines',
    )
    assert parse(as_toml(cluster), where="it") == cluster
    assert cluster.num_hosts == len(means_s)


@pytest.mark.parametrize("name", shipped())
def test_shipped_clusters_are_written_as_they_are_read(name: str) -> None:
    assert parse(as_toml(load(name)), where="it") == load(name)


def test_every_table_is_written() -> None:
    here = Site(name="here", bandwidth_gbit_per_s=1.0, latency_ms=3.0)
    there = Site(name="there", bandwidth_gbit_per_s=1.0, latency_ms=0.5)
    cluster = Cluster(
        hosts=(
            Hosts(count=4, bandwidth_gbit_per_s=1.0, site="here"),
            Hosts(name="b", bandwidth_gbit_per_s=2.0, burst_kbyte=3.0, site="there"),
        ),
        racks=Racks(hosts=2, bandwidth_gbit_per_s=5.0, core_gbit_per_s=7.0),
        sites=(here, there),
        compute=Compute(sample_s=0.1, distribution="log-normal", variation=0.2),
        servers=Servers(placement="with workers", request_us=3.0),
        communication=Communication(
            operation_us=1.0,
            packing_gbyte_per_s=0.5,
            exchange_gbyte_per_s=0.4,
            unevenness=0.3,
            request_core_us=7.0,
        ),
        shared_cores=2,
    )
    assert parse(as_toml(cluster), where="it") == cluster


# --- the file --------------------------------------------------------------------------------------------------------


def test_a_file_that_exists_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    probe.require_writable(out, force=False)
    out.write_text("mine")
    with pytest.raises(UsageError, match=r"cluster\.toml exists; give another --out, or --force to replace it"):
        probe.require_writable(out, force=False)
    probe.require_writable(out, force=True)
    with pytest.raises(UsageError, match="is a directory"):
        probe.require_writable(tmp_path, force=True)
    with pytest.raises(UsageError, match="in no directory that exists"):
        probe.require_writable(tmp_path / "no" / "such.toml", force=True)
    cluster = fit(facts(2), taken(1.0, 1.0), reports(2), about="it")
    probe.write(cluster, out)
    assert load(out) == cluster
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.toml"]


def test_the_command_looks_before_it_starts_anything(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    out.write_text("mine")
    for arguments, message in ((["--out", str(out)], "--force to replace it"), (["--steps", "1"], "at least 3, not 1")):
        said = CliRunner().invoke(app, ["probe", str(steps.__file__), *arguments])
        assert isinstance(said.exception, UsageError)
        assert message in str(said.exception)
    assert out.read_text() == "mine"


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    cluster = fit(facts(2), taken(1.0, 1.0), reports(2), about="it")
    with pytest.raises(RunFailed, match=r"cannot write .*gone.*: No such file"):
        probe.write(cluster, tmp_path / "gone" / "cluster.toml")


def test_a_plan_of_too_little_is_refused() -> None:
    with pytest.raises(UsageError, match="--steps must be at least 3, not 2"):
        probe.plan_for("train.py", num_steps=2)
    with pytest.raises(UsageError, match="--max-time must be above 0"):
        probe.plan_for("train.py", max_s=0.0)
    with pytest.raises(UsageError, match=r"cannot read the script nowhere\.py"):
        probe.plan_for("nowhere.py")


def test_reports_survive_their_way() -> None:
    step, net = taken(0.1)[0], reports(3)[1]
    assert steps.read(json.loads(json.dumps(dataclasses.asdict(step)))) == step
    assert network.read(json.loads(json.dumps(dataclasses.asdict(net)))) == net
