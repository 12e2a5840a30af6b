"""What is made of a probe's measurements, and the file that comes out."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.cluster.description import Cluster, Communication, Compute, Hosts, Racks, Servers, Site
from paceline.cluster.reading import load, parse, shipped
from paceline.cluster.writing import as_toml
from paceline.errors import RunFailed, UsageError
from paceline.probing import measuring
from paceline.probing import step_times as steps
from paceline.probing import traffic as network
from paceline.probing.bursts import MessageCost
from paceline.probing.exchanging import ExchangeCost
from paceline.probing.fitting import ASSUMED_INCAST, MOST_HANDLING, HostFacts, fit
from paceline.probing.step_times import StepReport
from paceline.probing.traffic import NetworkReport, PairReport


def pair(source: int, destination: int, **changes: float) -> PairReport:
    numbers = {
        "latency_s": 50e-6,
        "bytes_per_s": 125e6,
        "pushed_bytes_per_s": 120e6,
        "piece_s": 20e-3,
    }
    message = {
        "message_s": 80e-6,
        "burst_s": 80e-6 + 6 * 15e-6,
        "message_core_s": 20e-6,
        "burst_core_s": 20e-6 + 6 * 5e-6,
    }
    cost = {
        "request_s": 300e-6,
        "request_core_s": 180e-6,
        "bytes_per_core_s": 4e8,
        "row_request_s": 900e-6,
        "row_request_core_s": 700e-6,
        "row_request_variation": 0.3,
    }
    changed = {**numbers, **message, **cost, **changes}
    exchange = ExchangeCost(**{name: changed.pop(name) for name in cost})
    messages = MessageCost(**{name: changed.pop(name) for name in message})
    return PairReport(source, destination, message=messages, exchange=exchange, **changed)


def reports(count: int, changes: dict[tuple[int, int], dict[str, float]] | None = None) -> list[NetworkReport]:
    changes = changes or {}
    return [
        NetworkReport(
            address=f"10.0.0.{rank}",
            rank=rank,
            pairs=tuple(pair(rank, other, **changes.get((rank, other), {})) for other in range(count) if other != rank),
            packing_bytes_per_s=5e8,
            operation_s=1e-3,
            operation_core_s=6e-4,
            lone_operation_s=4e-4 if count > 1 else 1e-3,
            lone_operation_core_s=2e-4,
            coding_s=5e-6,
            shared_bytes_per_s=2e9,
            memory_bytes_per_s=8e9,
            row_bytes_per_s=3e9,
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
        name="host",
        count=3,
        cores=4,
        bandwidth_gbit_per_s=1.0,
        latency_us=50.0,
        memory_gbyte_per_s=8.0,
        row_gbyte_per_s=3.0,
    )
    assert cluster.compute.step_s == 0.2
    assert cluster.compute.backward_share == 0.6
    assert cluster.compute.trace_s == pytest.approx((0.18, 0.2, 0.22) * 3)
    assert cluster.compute.gradient_shares == (0.25, 0.75)
    # 300 us there and back, of which 100 us are the way: 100 us at each end.
    assert cluster.communication.request_us == cluster.servers.request_us == pytest.approx(100.0)
    # Seven messages, of which six follow another one.
    assert cluster.communication.message_us == pytest.approx(30.0)
    assert cluster.communication.further_message_us == pytest.approx(15.0)
    assert cluster.communication.message_core_us == pytest.approx(20.0)
    assert cluster.communication.further_message_core_us == pytest.approx(5.0)
    assert cluster.communication.request_core_us == pytest.approx(180.0)
    # 900 us of a request about rows, of which 100 us are the way, which does not vary; and two ends vary more than both
    # together.
    assert cluster.communication.row_request_us == cluster.servers.row_request_us == pytest.approx(400.0)
    assert cluster.communication.row_request_core_us == pytest.approx(700.0)
    assert cluster.communication.row_request_variation == pytest.approx(0.3 * 900 / 800 * math.sqrt(2), rel=1e-3)
    # A small all-reduce of 1 ms, of which 0.4 ms are its own; and a ring of three has four rounds.
    assert cluster.communication.operation_us == pytest.approx(400.0)
    assert cluster.communication.operation_core_us == pytest.approx(200.0)
    assert cluster.communication.hop_us == pytest.approx(600.0 / 4)
    assert cluster.communication.hop_core_us == pytest.approx(400.0 / 4)
    assert cluster.communication.coding_us == pytest.approx(5.0)
    assert cluster.communication.packing_gbyte_per_s == 0.5
    assert cluster.communication.exchange_gbyte_per_s == 0.4
    assert cluster.servers.placement == "with workers"


@pytest.mark.parametrize("latency_us", [50, 10_000])
def test_what_requests_about_rows_vary_by_is_the_same_however_far_hosts_are(latency_us: int) -> None:
    """What both ends take varies by 0.8 of its mean, 1.5 ms; what is measured, with the way, varies by less."""
    request_us = 1500 + 2 * latency_us
    one = {
        "latency_s": latency_us * 1e-6,
        "row_request_s": request_us * 1e-6,
        "row_request_variation": 0.8 * 1500 / request_us,
    }
    network = reports(2, {(0, 1): one, (1, 0): one})
    costs = fit(facts(2), taken(0.2, 0.2), network, about="it").communication
    assert costs.row_request_us == pytest.approx(750.0)
    assert costs.row_request_variation == pytest.approx(0.8 * math.sqrt(2), rel=1e-3)


def test_a_request_about_rows_that_takes_no_more_than_the_way_does_not_vary() -> None:
    one = {"latency_s": 500e-6, "row_request_s": 900e-6}
    costs = fit(facts(2), taken(0.2, 0.2), reports(2, {(0, 1): one, (1, 0): one}), about="it").communication
    assert (costs.row_request_us, costs.row_request_variation) == (0.0, 0.0)


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
    names += ("burst_s", "burst_core_s", "row_request_s", "row_request_core_s", "row_request_variation")
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
        servers=Servers(placement="with workers", request_us=3.0, row_request_us=4.0),
        communication=Communication(
            operation_us=1.0,
            operation_core_us=0.5,
            hop_us=2.0,
            hop_core_us=3.0,
            coding_us=4.0,
            packing_gbyte_per_s=0.5,
            exchange_gbyte_per_s=0.4,
            unevenness=0.3,
            message_us=9.0,
            further_message_us=6.0,
            message_core_us=5.0,
            further_message_core_us=0.0,
            request_core_us=7.0,
            row_request_us=0.0,
            row_request_core_us=8.0,
            row_request_variation=0.5,
        ),
        shared_cores=2,
    )
    assert parse(as_toml(cluster), where="it") == cluster
    for name in ("row_request_us", "further_message_core_us"):
        assert f"{name} = 0.0" in as_toml(cluster)  # which is not the default


def test_a_file_that_says_nothing_of_bursts_has_each_message_as_the_first_one() -> None:
    text = as_toml(fit(facts(2), taken(1.0, 1.0), reports(2), about="it"))
    old = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(("further_", "operation_")))
    costs = parse(old, where="it").communication
    assert (costs.operation_us, costs.operation_core_us) == (0.0, 0.0)
    assert costs.further_message_s == pytest.approx(costs.message_us * 1e-6)
    assert costs.further_message_core_s == pytest.approx(costs.message_core_us * 1e-6) == pytest.approx(20e-6)
    dearer = text.replace("further_message_core_us = 5.0", "further_message_core_us = 21.0")
    with pytest.raises(UsageError, match=r"so at most 20 \(message_core_us\), not 21"):
        parse(dearer, where="it")


def test_measurements_that_vary_make_nothing_take_less_than_nothing() -> None:
    """Neither a burst that took less than one message, or much more, nor a lone operation that took longer than one
    with others."""
    for burst_s, further_us in ((10e-6, 0.0), (1.0, 20.0)):
        network = [
            dataclasses.replace(report, lone_operation_s=2e-3, lone_operation_core_s=2e-3)
            for report in reports(2, {way: {"burst_s": burst_s, "burst_core_s": burst_s} for way in ((0, 1), (1, 0))})
        ]
        costs = fit(facts(2), taken(1.0, 1.0), network, about="it").communication
        assert costs.further_message_core_us == pytest.approx(further_us)
        assert (costs.operation_us, costs.hop_us) == (pytest.approx(1000.0), 0.0)
        assert (costs.operation_core_us, costs.hop_core_us) == (pytest.approx(600.0), 0.0)


def test_a_file_that_says_nothing_of_requests_about_rows_has_them_as_any_request() -> None:
    text = as_toml(fit(facts(2), taken(1.0, 1.0), reports(2), about="it"))
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("row_request"))
    cluster = parse(text, where="it")
    costs = cluster.communication
    assert (costs.row_request_us, costs.row_request_core_us, costs.row_request_variation) == (None, None, 0.0)
    assert costs.row_request_s == costs.request_s == pytest.approx(100e-6)
    assert costs.row_request_core_s == pytest.approx(180e-6)
    assert cluster.servers.row_request_s == cluster.servers.request_s == pytest.approx(100e-6)
    with pytest.raises(UsageError, match="row_request_variation"):
        parse(text.replace("[communication]", "[communication]\nrow_request_variation = -0.1"), where="it")


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_file_that_exists_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    measuring.require_writable(out, force=False)
    out.write_text("mine")
    with pytest.raises(UsageError, match=r"cluster\.toml exists; give another --out, or --force to replace it"):
        measuring.require_writable(out, force=False)
    measuring.require_writable(out, force=True)
    with pytest.raises(UsageError, match="is a directory"):
        measuring.require_writable(tmp_path, force=True)
    with pytest.raises(UsageError, match="in no directory that exists"):
        measuring.require_writable(tmp_path / "no" / "such.toml", force=True)
    cluster = fit(facts(2), taken(1.0, 1.0), reports(2), about="it")
    measuring.write(cluster, out)
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
        measuring.write(cluster, tmp_path / "gone" / "cluster.toml")


def test_a_plan_of_too_little_is_refused() -> None:
    with pytest.raises(UsageError, match="--steps must be at least 3, not 2"):
        measuring.config_for("train.py", num_steps=2)
    with pytest.raises(UsageError, match="--max-time must be above 0"):
        measuring.config_for("train.py", max_s=0.0)
    with pytest.raises(UsageError, match=r"cannot read the script nowhere\.py"):
        measuring.config_for("nowhere.py")


def test_reports_survive_their_way() -> None:
    step, net = taken(0.1)[0], reports(3)[1]
    assert steps.read(json.loads(json.dumps(dataclasses.asdict(step)))) == step
    assert network.read(json.loads(json.dumps(dataclasses.asdict(net)))) == net
