"""Times and staleness on the virtual engine that follow from theory, and the costs of whole strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from paceline import messages
from paceline.cluster.description import Cluster, Compute, Hosts, Servers
from paceline.comm.servers import group
from paceline.engines.virtual.carrier import VirtualCarrier
from paceline.engines.virtual.server import VirtualServer
from paceline.messages import IN_TURN, Kind, Message
from paceline.running.result import Result
from paceline.server import client_core, server_core, windows
from paceline.server.windows import LEAST_ANSWERS, PIECES_UNDER_WAY, AnswerWindow
from paceline.training.worker import Worker
from tests.conformance.reference import train_alone
from tests.conformance.rows import SELDOM, loader_of, loader_to_leave, problem
from tests.conformance.scripts import EXACT, SCRIPTS, NormalisedSGD, assert_close
from tests.conformance.virtual_cluster import GIGABIT, PLAIN, STEP_S, cluster_of, run, tiny


def cut_into_pieces(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    for module in (group, client_core, server_core):
        monkeypatch.setattr(module, "FRAME_BYTES", piece_bytes)


# --- theory ----------------------------------------------------------------------------------------------------------


def test_constant_compute_gives_asynchronous_workers_a_staleness_of_n_minus_1(tmp_path: Path) -> None:
    result = run(tiny, tmp_path, "ps-asp", 8, cluster=cluster_of(), max_steps=200, checkpoint_every=SELDOM)
    assert {update.staleness for update in result.updates[8:]} == {7}
    # The last of eight gradients at a time are on their way when the budget is spent.
    assert result.training_time_s == pytest.approx((200 / 8 + 1) * STEP_S, rel=0.01)


def test_exponential_compute_gives_a_geometric_staleness(tmp_path: Path) -> None:
    """Whoever finishes next is any of n with the same chance: P(k) = (1 - 1/n)**k / n, of mean n - 1."""
    n = 5
    cluster = cluster_of(distribution="exponential")
    result = run(tiny, tmp_path, "ps-asp", n, cluster=cluster, max_steps=3000, checkpoint_every=SELDOM)
    staleness = [update.staleness for update in result.updates[n:]]
    assert sum(staleness) / len(staleness) == pytest.approx(n - 1, rel=0.05)
    for k in range(4):
        share = staleness.count(k) / len(staleness)
        assert share == pytest.approx((1 - 1 / n) ** k / n, abs=0.025)


@pytest.mark.parametrize("num_workers", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_exponential_stragglers_make_synchronous_steps_grow_as_harmonic_numbers(
    num_workers: int, tmp_path: Path
) -> None:
    """The slowest of n takes 1 + 1/2 + ... + 1/n times the mean; its standard deviation is below 1.3 times."""
    num_steps = 400
    result = run(
        tiny, tmp_path, "ps-bsp", num_workers, cluster=cluster_of(distribution="exponential"), max_steps=num_steps
    )
    harmonic = sum(1 / k for k in range(1, num_workers + 1))
    tolerance = 3 * 1.3 / num_steps**0.5
    assert result.training_time_s / num_steps / STEP_S == pytest.approx(harmonic, abs=tolerance)


def test_backup_workers_leave_slow_hosts_out(tmp_path: Path) -> None:
    """The order statistic of constants: with one slow host of four, the third of four is as quick as the first."""
    cluster = cluster_of(slow=0.2)
    for backup_workers, mean_s in ((0, 5 * STEP_S), (1, STEP_S)):
        result = run(
            tiny,
            tmp_path / str(backup_workers),
            "ps-bsp",
            4,
            cluster=cluster,
            max_steps=50,
            options={"backup_workers": backup_workers, **PLAIN},
        )
        first_s = min(record.time_s for record in result.steps if record.iteration == 50)
        assert first_s / 50 == pytest.approx(mean_s, rel=0.02)


def test_one_backup_worker_of_two_with_exponential_compute(tmp_path: Path) -> None:
    """By hand: with both workers at the clock, it closes at rate 2, with one at rate 1, and the other, whose gradient
    is late, catches up at rate 1. So one third of the time both are, and clocks close at rate 4/3: 3/4 of the mean
    step, where both together need 3/2."""
    result = run(
        tiny,
        tmp_path,
        "ps-bsp",
        2,
        cluster=cluster_of(distribution="exponential"),
        max_steps=1500,
        options={"backup_workers": 1},
    )
    assert result.training_time_s / 1500 / STEP_S == pytest.approx(0.75, rel=0.08)


# --- costs of whole strategies ---------------------------------------------------------------------------------------


def wide(worker: Worker, out: Path, *, optimizer: Any = SGD) -> None:
    """1,000,000 parameters, 4 MB, in one layer."""
    model = nn.Linear(10, 100_000, bias=False)
    model, updater, loader = worker.prepare(model, optimizer(model.parameters(), lr=1e-3), loader_of(problem()))
    for number, (x, _, _) in enumerate(loader):
        updater.zero_grad()
        model(x[:1]).mean().backward()
        updater.step()
        if number == 2:
            break


def exchange_s(result: Result) -> float:
    """What steps take besides computing, on the average."""
    return result.training_time_s / max(record.step for record in result.steps) - STEP_S


@pytest.mark.parametrize("num_workers", [2, 4])
def test_servers_on_workers_hosts_take_as_long_as_a_ring(num_workers: int, tmp_path: Path) -> None:
    """2(n-1)M/(nB), for M = 4 MB."""
    expected_s = 2 * (num_workers - 1) * 4e6 / (num_workers * GIGABIT)
    options = {"servers": num_workers, **PLAIN}
    cluster = cluster_of(gbit_per_s=1.0, placement="with workers")
    ring = run(wide, tmp_path / "ring", "all-reduce", num_workers, cluster=cluster, options={"bucket_mb": 100.0})
    assert exchange_s(ring) == pytest.approx(expected_s, rel=0.01)
    result = run(wide, tmp_path / "co-located", "ps-bsp", num_workers, cluster=cluster, options=options)
    # Pieces are answered while others arrive, but the last of about 1 MiB comes back when it has come.
    assert expected_s * 0.99 <= exchange_s(result) <= expected_s + 2 * 2**20 / GIGABIT


@pytest.mark.parametrize(("num_workers", "num_servers"), [(4, 1), (4, 2), (2, 4)])
def test_separate_servers_take_one_way_more_or_less_at_a_time(
    num_workers: int, num_servers: int, tmp_path: Path
) -> None:
    """max(M/B, nM/(kB)) each way. Of whole tensors both ways follow each other; pieces go both ways at once."""
    way_s = max(4e6 / GIGABIT, num_workers * 4e6 / (num_servers * GIGABIT))
    options = {"servers": num_servers, **PLAIN}
    cluster = cluster_of(gbit_per_s=1.0)
    pieces = run(wide, tmp_path / "pieces", "ps-bsp", num_workers, cluster=cluster, options=options)
    slack_s = 2 * num_workers * 2**20 / GIGABIT
    assert 0.99 * way_s <= exchange_s(pieces) <= way_s + slack_s
    if num_servers == 1:
        script = partial(wide, optimizer=NormalisedSGD)
        whole = run(script, tmp_path / "whole", "ps-bsp", num_workers, cluster=cluster, options=options)
        assert exchange_s(whole) == pytest.approx(2 * way_s, rel=0.03)


def deep(worker: Worker, out: Path) -> None:
    """Eight layers of 1 MB, each as costly as the others."""
    model = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(8)))
    model, optimizer, _ = worker.prepare(model, SGD(model.parameters(), lr=1e-3), loader_to_leave())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 500)).mean().backward()
        optimizer.step()


def test_buckets_move_while_backward_goes_on(tmp_path: Path) -> None:
    """Of eight buckets that take 8 ms each, the last leaves when backward ends: the others hide behind it.

    Backward takes 120 ms and gives a bucket every 15 ms; between two hosts a bucket of 1 MB takes 2(n-1)M/(nB) = 8 ms.
    """
    cluster = Cluster(hosts=(Hosts(count=2, bandwidth_gbit_per_s=1.0, latency_us=0.0),), compute=Compute(step_s=0.18))
    result = run(deep, tmp_path / "many", "all-reduce", 2, cluster=cluster, options={"bucket_mb": 1.0})
    for record in result.steps[2:]:
        assert record.compute_s == pytest.approx(0.18, rel=0.01)
        assert record.communication_s + record.waiting_s == pytest.approx(0.008, rel=0.05)
    single = run(deep, tmp_path / "one", "all-reduce", 2, cluster=cluster, options={"bucket_mb": 100.0})
    for record in single.steps[2:]:
        assert record.communication_s + record.waiting_s > 0.05


@pytest.mark.parametrize("case", ["adam", "mixed dtypes"])
@pytest.mark.parametrize("servers", [1, 3])
def test_small_pieces_equal_one_process(
    case: str, servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into_pieces(monkeypatch, 64)
    script, tolerance = SCRIPTS[case]
    result = run(
        lambda worker, out: script(worker), tmp_path, "ps-bsp", 3, cluster=cluster_of(), options={"servers": servers}
    )
    assert_close(result.model_state(), train_alone(script, 3), tolerance if case != "adam" else EXACT)


@pytest.mark.parametrize(
    ("strategy", "options", "is_in_turn"),
    [
        ("ps-bsp", {}, True),
        ("ps-bsp", {"backup_workers": 1}, False),
        ("ps-ssp", {"staleness": 0}, False),
    ],
)
def test_a_worker_sends_no_more_than_a_few_pieces_ahead_of_the_answers(
    strategy: str, options: dict[str, Any], is_in_turn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except where gradients are applied when they come, or shards follow another's decision and want all first."""
    cut_into_pieces(monkeypatch, 64)
    under_way: Counter[tuple[int, int]] = Counter()
    most = 0
    receive, deliver = VirtualServer.receive, VirtualCarrier.deliver

    def noted_receipt(server: VirtualServer, client: Any, message: Message) -> None:
        nonlocal most
        if message.kind is Kind.EXCHANGE:
            under_way[server.core.index, message.sender] += 1
            most = max(most, under_way[server.core.index, message.sender])
        receive(server, client, message)

    def noted_delivery(carrier: VirtualCarrier, server: int, message: Message) -> None:
        if message.kind is Kind.ANSWER:
            under_way[server, carrier._client.rank] -= 1  # type: ignore[union-attr]
        deliver(carrier, server, message)

    monkeypatch.setattr(VirtualServer, "receive", noted_receipt)
    monkeypatch.setattr(VirtualCarrier, "deliver", noted_delivery)
    script, _ = SCRIPTS["one-cycle schedule, momentum"]
    result = run(
        lambda worker, out: script(worker),
        tmp_path,
        strategy,
        3,
        cluster=cluster_of(slow=0.5),  # the others' pieces wait for its
        options={"servers": 2, **options},
    )
    assert result.iteration > 0
    assert most == PIECES_UNDER_WAY if is_in_turn else most > PIECES_UNDER_WAY


@pytest.mark.parametrize("under_way_s", [0.0, 1e3])
def test_a_server_has_a_few_answers_under_way_to_all_workers_together(
    under_way_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or more, where what arrives within a time is more."""
    cut_into_pieces(monkeypatch, 64)
    monkeypatch.setattr(windows, "UNDER_WAY_S", under_way_s)
    most = 0
    take = AnswerWindow.take

    def noted(window: AnswerWindow[Any], now_s: float) -> Iterator[Any]:
        nonlocal most
        for answer in take(window, now_s):
            most = max(most, window.under_way.total())
            yield answer

    monkeypatch.setattr(AnswerWindow, "take", noted)
    script, _ = SCRIPTS["one-cycle schedule, momentum"]
    cluster = cluster_of(placement="with workers")
    result = run(lambda worker, out: script(worker), tmp_path, "ps-bsp", 3, cluster=cluster, options={"servers": 2})
    assert result.iteration > 0
    assert most > LEAST_ANSWERS if under_way_s else most == LEAST_ANSWERS


def test_where_every_worker_has_a_server_beside_it_answers_go_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All links are alike then, and to wait for word of each answer would only take time."""
    cut_into_pieces(monkeypatch, 32)
    have_many_pieces: set[bool] = set()
    send = VirtualServer._send

    def noted(own: VirtualServer, worker: int, message: Message) -> None:
        have_many_pieces.add(own.core.is_in_turn)
        assert not message.flags & IN_TURN
        send(own, worker, message)

    monkeypatch.setattr(VirtualServer, "_send", noted)
    script, _ = SCRIPTS["one-cycle schedule, momentum"]
    cluster = cluster_of(placement="with workers")
    result = run(lambda worker, out: script(worker), tmp_path, "ps-bsp", 2, cluster=cluster, options={"servers": 2})
    assert result.iteration > 0
    assert have_many_pieces == {True}


@pytest.mark.parametrize("piece_bytes", [64, 2**20])
def test_waiting_for_a_slow_worker_is_counted_once_however_many_pieces_wait(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into_pieces(monkeypatch, piece_bytes)
    script, _ = SCRIPTS["one-cycle schedule, momentum"]
    cluster = cluster_of(slow=0.5)  # the host of the first worker
    result = run(
        lambda worker, out: script(worker), tmp_path, "ps-bsp", 3, cluster=cluster, options={"servers": 2, **PLAIN}
    )
    for record in result.steps:
        late_s = 0.0 if record.worker == 0 else STEP_S
        assert record.waiting_s == pytest.approx(late_s, abs=0.02 * STEP_S)
        assert record.communication_s < 0.02 * STEP_S


def test_waiting_for_a_slow_connection_is_counted_once_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four pieces at a time wait for the slow worker's, one after the other, until all have come."""
    cut_into_pieces(monkeypatch, 64)
    monkeypatch.setattr(messages, "HEAD_BYTES", 0)  # else to say that they have come takes longer than such pieces
    counted_s: Counter[int] = Counter()
    deliver = VirtualCarrier.deliver

    def noted(carrier: VirtualCarrier, server: int, message: Message) -> None:
        counted_s[carrier._client.rank] += message.waiting_s  # type: ignore[union-attr]
        deliver(carrier, server, message)

    monkeypatch.setattr(VirtualCarrier, "deliver", noted)
    slow_bytes_per_s = 1e4
    hosts = (
        Hosts(name="slow", bandwidth_gbit_per_s=8 * slow_bytes_per_s / 1e9, latency_us=0.0),
        Hosts(count=20, bandwidth_gbit_per_s=1000.0, latency_us=0.0),
    )
    cluster = Cluster(hosts=hosts, compute=Compute(step_s=STEP_S), servers=Servers(placement="separate"))
    script, _ = SCRIPTS["one-cycle schedule, momentum"]
    result = run(lambda worker, out: script(worker), tmp_path, "ps-bsp", 2, cluster=cluster, options=PLAIN)
    model_bytes = sum(tensor.nbytes for tensor in result.model_state().values())
    of_fast = [record for record in result.steps if record.worker == 1]
    for record in of_fast[1:]:
        assert record.waiting_s == pytest.approx(model_bytes / slow_bytes_per_s, rel=0.02)
    passed_s = sum(record.waiting_s + record.communication_s for record in of_fast)
    assert counted_s[1] < 1.01 * passed_s, "no moment is counted twice"
