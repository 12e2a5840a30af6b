"""Rows that workers on the servers' host update themselves: what servers would have made of them, and nothing twice."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.base import TableStore
from paceline.comm.servers.group import ServerGroup
from paceline.comm.servers.rows_in_view import RowsInView, RowsSeen, changing
from paceline.comm.servers.tables import ServedTables
from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.messages import Kind, Message, WireError
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous
from paceline.server.server_core import ServerCore
from paceline.server.spec import OptimizerSpec, Push, Reply
from paceline.server.tables.hashing import owners
from paceline.server.tables.row_optimizers import of_text
from paceline.server.tables.spec import RowGradients, TableSpec
from paceline.server.tables.table import Table
from tests.unit.server_groups import attached

FORKS = multiprocessing.get_context("fork")  # another worker starts at once
DIM, NUM_KEYS, SERVERS = 4, 300, 2
OPTIMIZERS = ["sgd:lr=0.1", "adagrad:lr=0.1", "row-wise-adagrad:lr=0.1", "adam:lr=0.1", "ftrl:lr=0.1"]
PUSH = Push(pause_at=10**9)
LAYOUT = by_group([TensorSpec("weight", (64,), torch.float32, 0)])
SGD = OptimizerSpec(torch.optim.SGD, {"lr": 0.1}, ({"lr": 0.1},), element_wise=True)
ALONE = Membership.first(1)


def spec_of(optimizer: str = "adam:lr=0.1", **given: Any) -> TableSpec:
    return TableSpec("users", dim=DIM, optimizer=of_text(optimizer), **{"num_rows": 1000, "seed": 3, **given})


class Servers:
    """Some with one table, which they lend, and a worker that sees it."""

    def __init__(self, spec: TableSpec, num_servers: int = SERVERS) -> None:
        self.spec = spec
        self.storages = [RowsInView() for _ in range(num_servers)]
        self.tables = [Table(spec, storage, is_lent=True) for storage in self.storages]
        self.make(torch.arange(NUM_KEYS))

    def make(self, keys: Tensor) -> None:
        """These keys' rows, by a gradient of 0 from elsewhere."""
        values = torch.zeros(len(keys), DIM, dtype=self.spec.computed)
        owner = owners(keys, len(self.tables))
        for server, table in enumerate(self.tables):
            table.update(RowGradients(keys[owner == server], values[owner == server]))
        self.seen = RowsSeen([self.spec], self.shown())

    def shown(self) -> list[dict[str, Any]]:
        return [
            {**storage.plain_view(), "tables": [table.plain_view()]}
            for storage, table in zip(self.storages, self.tables, strict=True)
        ]

    def state(self) -> dict[str, Tensor]:
        """Of the first server."""
        return self.tables[0].state()


def update(seen: RowsSeen, gradients: RowGradients, spec: TableSpec, num_servers: int = SERVERS) -> None:
    found = seen.find(0, gradients.keys)
    assert found is not None
    assert seen.update(0, found, gradients.values, spec.optimizer, range(num_servers))


def gradients_of(keys: set[int], seed: int, dtype: torch.dtype = torch.float32) -> RowGradients:
    values = torch.randn(len(keys), DIM, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return RowGradients(torch.tensor(sorted(keys), dtype=torch.int64), values)


@settings(max_examples=25, deadline=None)
@given(
    batches=st.lists(st.sets(st.integers(0, NUM_KEYS - 1), max_size=60), min_size=1, max_size=5),
    optimizer=st.sampled_from(OPTIMIZERS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    num_rows=st.sampled_from([1000, 2**63]),
    num_servers=st.integers(1, 3),
    is_ahead=st.booleans(),
    by_worker=st.data(),
)
def test_an_update_is_the_servers(
    batches: list[set[int]],
    optimizer: str,
    dtype: torch.dtype,
    num_rows: int,
    num_servers: int,
    is_ahead: bool,
    by_worker: Any,
) -> None:
    """Bit by bit, whoever makes which one, with what the optimizer keeps and the number of updates, which need not be
    the same on all servers."""
    spec = spec_of(optimizer, dtype=dtype, num_rows=num_rows)
    servers, twins = Servers(spec, num_servers), Servers(spec, num_servers)
    for each in (servers, twins) if is_ahead else ():
        each.tables[0].update(gradients_of(set(), 0, spec.computed))
    for number, keys in enumerate(batches):
        found = gradients_of(keys, number, spec.computed)
        owner = owners(found.keys, num_servers)
        parts = [RowGradients(found.keys[owner == each], found.values[owner == each]) for each in range(num_servers)]
        if by_worker.draw(st.booleans()):
            update(servers.seen, found, spec, num_servers)
        else:
            for table, part in zip(servers.tables, parts, strict=True):
                table.update(part)
        for table, part in zip(twins.tables, parts, strict=True):
            table.update(part)
    for table, twin in zip(servers.tables, twins.tables, strict=True):
        rows, expected = table.state(), twin.state()
        torch.testing.assert_close(rows, expected, rtol=0, atol=0)


def test_rows_that_are_yet_to_be_made_are_for_the_servers() -> None:
    servers = Servers(spec_of())
    keys = torch.tensor([1, NUM_KEYS + 1])
    for some, is_made in ((keys, False), (keys[:1], True), (keys[1:], False)):
        assert (servers.seen.find(0, some) is not None) == is_made
        servers.seen.read(0, some)
        assert (servers.seen.find(0, some) is not None) == is_made


@pytest.mark.parametrize("limits", [{"min_count": 2}, {"evict_after": 5}, {"max_rows": 500}])
def test_rows_that_come_late_or_go_are_not_lent(limits: dict[str, Any]) -> None:
    table = Table(spec_of(**limits), RowsInView(), is_lent=True)
    assert not table.is_lent
    assert list(table.plain_view()["columns"]) == ["rows"]


def test_rows_in_new_columns_wait_for_a_new_view() -> None:
    servers = Servers(spec_of("sgd:lr=1", std=0.0, num_rows=50_000))
    before, keys = servers.seen, torch.arange(NUM_KEYS)
    found = before.find(0, keys)
    assert found is not None
    servers.tables[0].update(RowGradients(torch.arange(500, 50_000), torch.zeros(49_500, DIM)))  # the other one's move
    values = torch.ones(NUM_KEYS, DIM)
    assert not before.update(0, found, values, servers.spec.optimizer, range(SERVERS))
    after = RowsSeen([servers.spec], servers.shown())
    assert after.update(0, found, values, servers.spec.optimizer, range(SERVERS))
    rows = after.read(0, keys)
    assert rows is not None
    assert rows.unique().tolist() == [-1.0]


@contextmanager
def worker(target: Any, *args: object) -> Iterator[tuple[Any, Connection]]:
    """Another process, until it is ended."""
    own, its = FORKS.Pipe()
    process = FORKS.Process(target=target, args=(its, *args))
    process.start()
    its.close()
    try:
        yield process, own
    finally:
        process.kill()
        process.join()


def add_ones(parent: Connection, spec: TableSpec, shown: list[dict[str, Any]], num: int) -> None:
    torch.set_num_threads(1)
    seen, keys = RowsSeen([spec], shown), torch.arange(NUM_KEYS)
    for _ in range(num):
        while (found := seen.find(0, keys)) is None:  # somebody else changes rows
            pass
        seen.update(0, found, -torch.ones(NUM_KEYS, DIM), spec.optimizer, range(SERVERS))
    parent.send(num)
    parent.recv()


def test_no_update_is_lost_among_workers_and_servers() -> None:
    """Each adds 1 to all rows, so often."""
    servers, num = Servers(spec_of("sgd:lr=1", std=0.0)), 200
    keys = torch.arange(NUM_KEYS)
    owner = owners(keys, SERVERS)
    shown = servers.shown()
    with worker(add_ones, servers.spec, shown, num) as (_, one), worker(add_ones, servers.spec, shown, num) as (_, two):
        for _ in range(num):
            for server, table in enumerate(servers.tables):
                own = keys[owner == server]
                with servers.storages[server].alone():
                    table.update(RowGradients(own, -torch.ones(len(own), DIM)))
        assert [one.recv(), two.recv()] == [num, num]
    rows = servers.seen.read(0, keys)
    assert rows is not None
    assert rows.unique().tolist() == [3.0 * num]
    assert [table.num_updates for table in servers.tables] == [3 * num + 1] * SERVERS


def hold(parent: Connection, shown: list[dict[str, Any]], spec: TableSpec) -> None:
    board = RowsSeen([spec], shown)._boards[0]
    with board.lock, changing([board]):
        parent.send("held")
        parent.recv()


def test_the_lock_outlives_a_worker_that_is_killed() -> None:
    """In the midst of an update: others read and update the rows."""
    servers = Servers(spec_of("sgd:lr=1", std=0.0), 1)
    keys = torch.arange(NUM_KEYS)
    with worker(hold, servers.shown(), servers.spec) as (process, other):
        assert other.recv() == "held"
        assert servers.seen.read(0, keys) is None
        done = threading.Event()

        def as_server() -> None:
            with servers.storages[0].alone():
                servers.tables[0].update(RowGradients(keys, -torch.ones(NUM_KEYS, DIM)))
            done.set()

        thread = threading.Thread(target=as_server)
        thread.start()
        assert not done.is_set()
        os.kill(process.pid, signal.SIGKILL)
        thread.join()
    update(servers.seen, RowGradients(keys, -torch.ones(NUM_KEYS, DIM)), servers.spec, 1)
    rows = servers.seen.read(0, keys)
    assert rows is not None
    assert rows.unique().tolist() == [2.0]


# --- by the store --------------------------------------------------------------------------------------------------


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many pushes have come to servers, with and without rows."""
    counts: Counter[str] = Counter()
    receive = ServerCore.receive

    def noted(core: ServerCore, message: Message, now_s: float) -> object:
        if message.kind is Kind.EXCHANGE:
            counts["rows" if "rows" in message.body else "plain"] += 1
        return receive(core, message, now_s)

    monkeypatch.setattr(ServerCore, "receive", noted)
    return counts


@contextmanager
def group_of_one(rule: AdmissionRule) -> Iterator[ServerGroup]:
    with attached(LAYOUT, SGD, rule, are_here=[True] * SERVERS) as group:
        yield group


def read(tables: TableStore, keys: Tensor) -> Tensor:
    return tables.read({0: keys}, is_fresh=False)[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_has_the_rows_that_servers_would_have(optimizer: str, pushed: Counter[str]) -> None:
    """Rows are made by the servers, then updated by the worker. In every third step a learning rate is set."""
    spec, num_steps = spec_of(optimizer), 12
    keys = torch.randperm(1000)[:NUM_KEYS]
    states, moved = [], []
    for staleness in (math.inf, 100):  # with a bound they are not lent
        with group_of_one(StaleSynchronous(ALONE, staleness=staleness)) as group:
            tables = group.open_tables([spec])
            for step in range(num_steps):
                read(tables, keys)
                values = torch.randn(NUM_KEYS, DIM, generator=torch.Generator().manual_seed(step))
                lr = 0.05 if step % 3 == 0 and spec.optimizer.may_change_lr else None
                tables.push([RowGradients(keys, values)], weight=2.0, lrs=[lr])
                assert group.exchange(PUSH._replace(weight=2.0)).iteration == step + 1
            states.append(tables.state(0))
            moved.append(group.timing.moved_bytes)
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert pushed == {"rows": SERVERS * (1 + num_steps), "plain": SERVERS * (num_steps - 1)}
    assert moved[0] == moved[1]


@pytest.mark.parametrize("rule", [BulkSynchronous(ALONE), StaleSynchronous(ALONE, staleness=3)], ids=["bsp", "ssp"])
def test_rows_that_somebody_waits_for_are_not_lent(rule: AdmissionRule, pushed: Counter[str]) -> None:
    keys = torch.arange(20)
    with group_of_one(rule) as group:
        tables = group.open_tables([spec_of()])
        for _ in range(3):
            read(tables, keys)
            tables.push([RowGradients(keys, torch.ones(20, DIM))], weight=1.0)
            group.exchange(PUSH)
    assert pushed == {"rows": 3 * SERVERS}


def test_rows_that_are_followed_are_not_lent(pushed: Counter[str]) -> None:
    """Of a weight, whose changed rows workers ask for."""
    keys = torch.arange(20)
    with group_of_one(StaleSynchronous(ALONE)) as group:
        tables = group.open_tables([spec_of("sgd:lr=1", std=0.0)])
        tables.changed([0])
        for _ in range(3):
            read(tables, keys)
            tables.push([RowGradients(keys, torch.ones(20, DIM))], weight=1.0)
            group.exchange(PUSH)
            assert tables.changed([0])[0].keys.sort().values.tolist() == keys.tolist()
    assert pushed == {"rows": 3 * SERVERS}


def test_a_push_that_is_no_update_leaves_rows_alone() -> None:
    keys = torch.arange(20)
    with group_of_one(StaleSynchronous(ALONE)) as group:
        tables = group.open_tables([spec_of("sgd:lr=1")])
        for is_void in (False, True, False):
            read(tables, keys)
            if not is_void:
                tables.push([RowGradients(keys, torch.ones(20, DIM))], weight=1.0)
            group.exchange(PUSH._replace(void=is_void))
        before = Table(spec_of("sgd:lr=1")).read(keys)
        torch.testing.assert_close(read(tables, keys), before - 2)


def test_rows_of_a_server_that_did_not_take_the_push_stay() -> None:
    """As where that has made all updates of the run."""
    keys = torch.arange(NUM_KEYS)
    with group_of_one(StaleSynchronous(ALONE)) as group:
        tables = group.open_tables([spec_of("sgd:lr=1")])
        tables.push([RowGradients(keys, torch.ones(NUM_KEYS, DIM))], weight=1.0)
        group.exchange(PUSH)
        before = read(tables, keys)
        tables.push([RowGradients(keys, torch.ones(NUM_KEYS, DIM))], weight=1.0)
        assert isinstance(tables, ServedTables)
        tables.settle(Reply(iteration=2, staleness=(0, -1), stop=False, admitted=True))
        is_taken = owners(keys, SERVERS) == 0
        torch.testing.assert_close(read(tables, keys), before - is_taken[:, None].float())


def test_a_gradient_that_is_not_finite_is_for_the_servers_to_refuse() -> None:
    keys = torch.arange(20)
    with group_of_one(StaleSynchronous(ALONE)) as group:
        tables = group.open_tables([spec_of("sgd:lr=1")])
        tables.push([RowGradients(keys, torch.ones(20, DIM))], weight=1.0)
        group.exchange(PUSH)
        rows = read(tables, keys)
        tables.push([RowGradients(keys, torch.full((20, DIM), torch.nan))], weight=1.0)
        with pytest.raises(WireError, match=r"table 'users': the gradient of key .* is not finite"):
            group.exchange(PUSH)
        assert torch.equal(read(tables, keys), rows)


def test_one_table_may_be_lent_and_another_not(pushed: Counter[str]) -> None:
    keys = torch.arange(20)
    specs = [spec_of("sgd:lr=1"), replace(spec_of("sgd:lr=1"), name="items", min_count=2)]
    with group_of_one(StaleSynchronous(ALONE)) as group:
        tables = group.open_tables(specs)
        twins = [Table(spec) for spec in specs]
        for _ in range(3):
            rows = tables.read({0: keys, 1: keys}, is_fresh=False)
            gradients = RowGradients(keys, torch.ones(20, DIM))
            for number, twin in enumerate(twins):
                torch.testing.assert_close(rows[number], twin.read(keys))
                twin.update(gradients)
            tables.push([gradients, gradients], weight=1.0)
            group.exchange(PUSH)
        for number, twin in enumerate(twins):
            torch.testing.assert_close(tables.state(number), twin.state(), rtol=0, atol=0)
    assert pushed == {"rows": 3 * SERVERS}
