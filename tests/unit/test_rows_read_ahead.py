"""Rows that come while a worker computes: the same as if it had asked for them when it needs them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.membership import Membership
from paceline.messages import HEAD_BYTES, Kind, Message, WireError
from paceline.server.tables.changes import Given
from paceline.server.tables.row_optimizers import of_text
from paceline.server.tables.shards import TableShards
from paceline.server.tables.spec import RowGradients, TableSpec
from tests.unit.test_kept_rows import ALL, KEYS, Server, Worker

DIM = 4


def spec_of(optimizer: str = "sgd:lr=1", **settings: object) -> TableSpec:
    return TableSpec("users", 100, DIM, of_text(optimizer), seed=3, **settings)  # type: ignore[arg-type]


def workers_of(spec: TableSpec, num_workers: int, beside: list[bool]) -> list[Worker]:
    servers = [Server(Membership.first(num_workers), math.inf) for _ in beside]
    return [Worker(rank, servers, spec, None, beside) for rank in range(num_workers)]


@settings(max_examples=25, deadline=None)
@given(
    spec=st.sampled_from(
        [
            spec_of(),
            spec_of("adagrad:lr=0.1"),
            spec_of(dtype=torch.bfloat16),
            spec_of(min_count=2, evict_after=1),
            spec_of(max_rows=2),
        ]
    ),
    num_workers=st.integers(1, 3),
    beside=st.lists(st.booleans(), min_size=1, max_size=3),
    data=st.data(),
)
def test_rows_read_ahead_are_as_they_are_when_they_are_needed(
    spec: TableSpec, num_workers: int, beside: list[bool], data: st.DataObject
) -> None:
    """Whoever updates them meanwhile, and whichever rows go; servers answer early or late."""
    workers = workers_of(spec, num_workers, beside)
    following = {}
    for seed in range(data.draw(st.integers(10, 25))):
        rank, server = data.draw(st.integers(0, num_workers - 1)), data.draw(st.integers(0, len(beside) - 1))
        worker = workers[rank]
        if server in worker.under_way and data.draw(st.booleans()):
            worker.servers[server].push(worker.under_way.pop(server), worker.clock)
            worker.clock += not worker.under_way
        elif server in worker.ahead and data.draw(st.booleans()):
            worker.deliver_ahead(server)
        elif worker.is_admitted:
            drawn = KEYS[sorted(data.draw(ALL))]
            keys = following.pop(rank, drawn) if data.draw(st.integers(0, 3)) else drawn  # a script may change its mind
            rows, before = worker.read(keys), worker.requests
            assert torch.equal(rows, worker.read(keys, is_fresh=True))
            assert worker.requests - before <= len(beside)
            following[rank] = KEYS[sorted(data.draw(ALL))]
            worker.tables.read_ahead({0: following[rank]})
            generator = torch.Generator().manual_seed(seed)
            gradient = torch.randn(len(keys), DIM, generator=generator)
            worker.tables.push([RowGradients(keys, gradient)], weight=1.0)


def test_what_has_not_changed_moves_once() -> None:
    """Of a key its 8 bytes, and the row; where it has changed, its place and the row again."""
    [one, other] = workers_of(spec_of(), 2, [False])
    one.tables.read_ahead({0: KEYS})
    one.deliver_ahead(0)
    other.tables.push([RowGradients(KEYS[2:4], torch.ones(2, DIM))], weight=1.0)
    other.servers[0].push(other.under_way.pop(0), 0)
    rows = one.read(KEYS)
    assert torch.equal(rows, other.read(KEYS))
    assert one.requests == 1  # besides the one that has read ahead
    assert one.timing.moved_bytes == 4 * HEAD_BYTES + len(KEYS) * (8 + 4 * DIM) + 2 * (4 + 4 * DIM)


def test_rows_that_the_worker_is_about_to_change_move_once() -> None:
    [worker] = workers_of(spec_of(), 1, [False])
    worker.read(KEYS[:3])
    worker.tables.read_ahead({0: KEYS})
    [(_, message)] = worker.ahead.values()
    assert message.body["counts"] == [len(KEYS) - 3]
    asked = worker.asked
    worker.tables.push([RowGradients(KEYS[:3], torch.ones(3, DIM))], weight=1.0)
    worker.servers[0].push(worker.under_way.pop(0), 0)
    assert torch.equal(worker.read(KEYS), worker.read(KEYS, is_fresh=True))
    assert worker.asked - asked == 3 + len(KEYS)


def test_a_server_beside_is_asked_when_rows_are_needed() -> None:
    [worker] = workers_of(spec_of(), 1, [True, False])
    worker.tables.read_ahead({0: KEYS})
    assert list(worker.ahead) == [1]
    worker.read(KEYS)
    assert worker.requests == 2
    [worker] = workers_of(spec_of(), 1, [True])
    worker.tables.read_ahead({0: KEYS})
    assert not worker.ahead


def test_servers_that_are_copied_are_not_asked_ahead() -> None:
    """Another one that takes over does not know what was read."""
    [worker] = workers_of(spec_of(), 1, [False])
    worker.tables._asks_ahead.fill_(False)  # as where its carrier does not read ahead
    worker.tables.read_ahead({0: KEYS})
    assert not worker.ahead


def test_a_row_has_changed_if_one_bit_has() -> None:
    rows = torch.zeros(4, 2)
    given, now = Given(torch.arange(4), rows.clone()), rows.clone()
    now[1, 0], now[2, 1] = -0.0, math.nan
    places, changed = given.changed(now.__getitem__)
    assert places.tolist() == [1, 2]
    assert torch.equal(changed.view(torch.int32), now[[1, 2]].view(torch.int32))
    assert not len(Given(torch.arange(4), now).changed(now.__getitem__).places)  # NaN is what it was


def test_nobody_hears_what_has_changed_of_rows_that_were_not_read_ahead() -> None:
    shards = TableShards()
    shards.receive(Message(Kind.OPEN_TABLES, 1, 0, body={"tables": [spec_of().plain()], "num_servers": 1}))
    since = Message(Kind.READ_ROWS, 1, 0, body={"tables": [], "counts": [], "since": [0]})
    with pytest.raises(WireError, match="refused READ_ROWS"):
        shards.receive(since)
    payload = [KEYS.numpy().tobytes()]
    shards.receive(Message(Kind.READ_AHEAD, 1, 0, body={"tables": [0], "counts": [len(KEYS)]}, payload=payload))
    shards.leave(0)
    with pytest.raises(WireError, match="refused READ_ROWS"):
        shards.receive(since)
