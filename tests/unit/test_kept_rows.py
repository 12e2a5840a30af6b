"""Rows that a worker has read and uses again: never older than the admission rule allows, and asked for less often."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.base import Timing
from paceline.comm.servers.tables import ServedTables
from paceline.errors import UsageError
from paceline.membership import Membership
from paceline.messages import HEAD_BYTES, Kind, Message
from paceline.server.actions import Send
from paceline.server.admission import StaleSynchronous
from paceline.server.closing import Applied
from paceline.server.tables.client_core import TableClient
from paceline.server.tables.kept_rows import Keeping, KeptRows
from paceline.server.tables.row_optimizers import of_text
from paceline.server.tables.shards import TableShards
from paceline.server.tables.spec import RowGradients, TableSpec
from paceline.strategies import build

CLOCKS = 8
KEYS = torch.arange(7)
ALL = st.sets(st.integers(0, len(KEYS) - 1), min_size=1)


class Server:
    """Of each push one update."""

    def __init__(self, members: Membership, staleness: float) -> None:
        self.rule, self.tables = StaleSynchronous(members, staleness=staleness), TableShards()
        self.tables.joins = False

    def receive(self, message: Message) -> Message:
        return Message(Kind.OK, 1, clock=self.rule.complete, **self.tables.receive(message))

    def push(self, message: Message, clock: int) -> None:
        """Rows, and the push that they belong to."""
        self.tables.receive(message)
        assert self.rule.push(message.sender, clock) == (message.sender,)
        self.tables.update([Applied(0, message.sender, clock, 0)])


class Worker:
    """Its own carrier, whose pushes are on their way to each server until they are delivered, and so is what it reads
    ahead."""

    is_all_beside = takes_rows_along = False
    reads_ahead = True

    def __init__(
        self,
        rank: int,
        servers: Sequence[Server],
        spec: TableSpec,
        keeping: Keeping | None,
        beside: Sequence[bool] | None = None,
    ) -> None:
        self.rank, self.servers, self.clock = rank, servers, 0
        self.beside = beside or [False] * len(servers)
        self.under_way: dict[int, Message] = {}
        self.ahead: dict[int, tuple[TableClient, Message]] = {}
        self.requests = self.asked = 0  # for rows, and their keys
        self.timing = Timing()
        self.tables = ServedTables(
            self,  # type: ignore[arg-type]
            [spec],
            collective=self,  # type: ignore[arg-type]
            timing=self.timing,
            epoch=1,
            store=self,  # type: ignore[arg-type]
            keeping=keeping,
        )

    def barrier(self) -> None:
        pass

    def set_off(self, client: TableClient, sends: Iterable[Send]) -> None:
        assert not self.ahead
        self.ahead = {server: (client, message) for server, message in sends}

    def deliver_ahead(self, server: int) -> None:
        client, message = self.ahead.pop(server)
        assert not list(client.receive(server, self.servers[server].receive(message)))

    def carry(self, client: TableClient, sends: Iterable[Send]) -> float:
        if not (sends := list(sends)):
            for server in list(self.ahead):
                self.deliver_ahead(server)
        for server, message in sends:
            if message.kind is Kind.PUSH_ROWS:
                self.under_way[server] = message
                answer = Message(Kind.OK, 1)
            else:
                self.asked += sum(message.body.get("counts", []))
                self.requests += message.kind is Kind.READ_ROWS
                answer = self.servers[server].receive(message)
            assert not list(client.receive(server, answer))
        return 0.0

    def read(self, keys: Tensor, *, is_fresh: bool = False) -> Tensor:
        return self.tables.read({0: keys}, is_fresh=is_fresh)[0]

    @property
    def is_admitted(self) -> bool:
        return not self.under_way and all(server.rule.is_admitted(self.rank) for server in self.servers)


def world(num_workers: int, num_servers: int, spec: TableSpec, *, staleness: float, steps: int) -> list[Worker]:
    servers = [Server(Membership.first(num_workers), staleness) for _ in range(num_servers)]
    return [Worker(rank, servers, spec, Keeping(steps, staleness)) for rank in range(num_workers)]


@settings(max_examples=15, deadline=None)
@given(
    num_workers=st.integers(1, 3),
    num_servers=st.integers(1, 2),
    staleness=st.integers(0, 3),
    data=st.data(),
)
def test_the_bound_of_ssp_holds_for_kept_rows(
    num_workers: int, num_servers: int, staleness: int, data: st.DataObject
) -> None:
    """An element of a row for each worker and clock, which becomes 1 with the update of this worker at this clock."""
    steps = data.draw(st.integers(1, max(1, staleness)))
    spec = TableSpec("users", 100, num_workers * CLOCKS, of_text("sgd:lr=1"), std=0.0)
    workers = world(num_workers, num_servers, spec, staleness=staleness, steps=steps)
    following: dict[int, Tensor] = {}
    turns = data.draw(
        st.lists(st.tuples(st.integers(0, num_workers - 1), st.integers(0, num_servers - 1)), min_size=20, max_size=50)
    )
    for rank, index in turns:
        worker = workers[rank]
        if index in worker.under_way:
            worker.servers[index].push(worker.under_way.pop(index), worker.clock)
            worker.clock += not worker.under_way
        elif index in worker.ahead:
            worker.deliver_ahead(index)
        elif worker.is_admitted and worker.clock < CLOCKS:
            keys = following.pop(rank) if rank in following else KEYS[sorted(data.draw(ALL))]
            rows = worker.read(keys).view(-1, num_workers, CLOCKS)
            assert bool(((rows == 0) | (rows == 1)).all())
            assert bool((rows[:, :, : max(0, worker.clock - staleness)] == 1).all())
            assert bool((rows[:, rank, : worker.clock] == 1).all())  # its own, where the optimizer keeps nothing
            gradient = torch.zeros(len(KEYS), num_workers, CLOCKS)
            gradient[:, rank, worker.clock] = -1
            if data.draw(st.booleans()):
                following[rank] = KEYS[sorted(data.draw(ALL))]
                worker.tables.read_ahead({0: following[rank]})
            worker.tables.push([RowGradients(KEYS, gradient.flatten(1))], weight=1.0)


def test_a_row_is_asked_for_once_in_so_many_steps() -> None:
    spec = TableSpec("users", 100, 16, of_text("adagrad:lr=1"))
    [worker] = world(1, 2, spec, staleness=math.inf, steps=2)
    asked = []
    for clock in range(7):
        worker.clock = clock
        worker.read(KEYS[: clock + 1])
        asked.append(worker.asked)
    assert asked == [1, 2, 3, 5, 7, 9, 12]  # key k first at clock k, and every third from then on
    assert (worker.tables.num_read, worker.tables.num_kept) == (28, 16)
    assert worker.timing.moved_bytes == worker.asked * (8 + 16 * 4) + 2 * HEAD_BYTES * worker.requests
    worker.read(KEYS, is_fresh=True)
    assert worker.asked == 19


def test_copies_are_dropped_once_they_may_not_be_used() -> None:
    spec = TableSpec("users", 10**9, 2, of_text("sgd"))
    kept = KeptRows(spec)
    for clock in range(20):
        keys = torch.arange(clock * 10, clock * 10 + 10).flip(0)
        kept.keep(keys, torch.full((10, 2), float(clock)), torch.full((10,), clock + 3), clock=clock)
        assert len(kept) == 10 * min(clock + 1, 4)
    is_kept, rows = kept.find(torch.tensor([165, 199, 3, 150]), clock=19)
    assert is_kept.tolist() == [True, True, False, False]
    assert rows[:, 0].tolist() == [16.0, 19.0]
    kept.drop()
    assert not kept.find(torch.tensor([165]), clock=19).is_kept.any()


@pytest.mark.parametrize("min_count", [1, 2])
def test_copies_have_own_updates_where_servers_make_them(min_count: int) -> None:
    """Whether a key has been counted often enough a worker does not know."""
    kept = KeptRows(TableSpec("users", 100, 1, of_text("sgd:lr=1"), min_count=min_count))
    kept.keep(KEYS, torch.zeros(len(KEYS), 1), torch.full((len(KEYS),), 9), clock=0)
    kept.update(RowGradients(KEYS[:3], -torch.ones(3, 1)))
    assert kept.find(KEYS, clock=1).rows.sum() == (3 if min_count == 1 else 0)


def test_a_load_drops_copies() -> None:
    spec = TableSpec("users", 100, 4, of_text("sgd"), std=0.0)
    [worker] = world(1, 1, spec, staleness=math.inf, steps=5)
    assert not worker.read(KEYS).any()
    state = {"keys": KEYS, "rows": torch.ones(len(KEYS), 4), "updates": torch.tensor(3), "seed": torch.tensor(0)}
    worker.tables.load(0, state)
    assert worker.read(KEYS).all()


@pytest.mark.parametrize(
    ("strategy", "options", "error"),
    [
        ("ps-bsp", {"row_staleness": "1"}, "row_staleness has no effect under ps-bsp"),
        ("ps-ssp", {"row_staleness": "4"}, "row_staleness=4 is above the staleness of ps-ssp, which is 3"),
        ("ps-asp", {"row_staleness": "-1"}, "row_staleness must be at least 0, not -1"),
        ("all-reduce", {"servers": "1", "row_staleness": "1"}, "row_staleness has no effect under rows=bsp"),
    ],
)
def test_settings_without_effect_are_refused(strategy: str, options: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        build(strategy, options)
