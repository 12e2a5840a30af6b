"""A worker's rows on real servers: read where they lie on its own host, asked for elsewhere, the same in the end."""

from __future__ import annotations

import errno
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from paceline.comm.base import TableStore
from paceline.comm.servers import holding, rows_in_view
from paceline.comm.servers.group import ServerGroup
from paceline.comm.servers.rows_in_view import RowsInView
from paceline.comm.shared_memory.block import BlockAddress
from paceline.errors import PeerLost
from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.messages import HEAD_BYTES, Kind, Message, WireError
from paceline.server.admission import BulkSynchronous
from paceline.server.server_core import ServerCore
from paceline.server.spec import OptimizerSpec, Push
from paceline.server.tables.row_optimizers import of_text
from paceline.server.tables.spec import RowGradients, TableSpec
from paceline.server.tables.table import Table
from tests.unit.server_groups import attached

SERVERS, DIM = 2, 4
LAYOUT = by_group([TensorSpec("weight", (64,), torch.float32, 0)])
SGD = OptimizerSpec(torch.optim.SGD, {"lr": 0.1}, ({"lr": 0.1},), element_wise=True)
TABLES = [TableSpec(name, 2**40, DIM, of_text("adam:lr=0.1"), seed=3) for name in ("users", "items")]
PUSH = Push(pause_at=10**9)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[Kind]:
    """How many messages of each kind have come to servers."""
    counts: Counter[Kind] = Counter()
    receive = ServerCore.receive

    def noted(core: ServerCore, message: Message, now_s: float) -> object:
        counts[message.kind] += 1
        return receive(core, message, now_s)

    monkeypatch.setattr(ServerCore, "receive", noted)
    return counts


def group_of_one(*, num_here: int) -> AbstractContextManager[ServerGroup]:
    """A worker attached to two servers, so many of which are on its host."""
    rule = BulkSynchronous(Membership.first(1))
    return attached(LAYOUT, SGD, rule, are_here=[index < num_here for index in range(SERVERS)])


def read(tables: TableStore, table: int, keys: Tensor) -> Tensor:
    return tables.read({table: keys}, is_fresh=False)[table]


def gradients_of(step: int) -> list[RowGradients | None]:
    """Of 200 rows of the first table, and in every other step of the second one's first 9."""
    generator = torch.Generator().manual_seed(step)
    keys = torch.randperm(500, generator=generator)[:200]
    users = RowGradients(keys, torch.randn(200, DIM, generator=generator))
    return [users, RowGradients(torch.arange(9), torch.ones(9, DIM)) if step % 2 else None]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[RowsInView]:
    """What servers have let workers see."""
    made: list[RowsInView] = []

    def noted() -> RowsInView:
        made.append(RowsInView())
        return made[-1]

    monkeypatch.setattr(holding, "RowsInView", noted)
    return made


@pytest.mark.parametrize("num_here", [SERVERS, 1, 0])
def test_rows_are_the_same_wherever_servers_are(num_here: int, asked: Counter[Kind], shared: list[RowsInView]) -> None:
    twins = [Table(spec) for spec in TABLES]
    keys = torch.arange(600).flip(0)
    num_steps = 6
    with group_of_one(num_here=num_here) as group:
        tables = group.open_tables(TABLES)
        for step in range(num_steps):
            gradients = gradients_of(step)
            tables.push(gradients, weight=1.0)
            assert group.exchange(PUSH).iteration == step + 1
            for number, (twin, given) in enumerate(zip(twins, gradients, strict=True)):
                if given is not None:
                    twin.update(given)
                assert torch.equal(read(tables, number, keys), twin.read(keys))
            assert read(tables, 0, keys[:0]).shape == (0, DIM)
        for number, twin in enumerate(twins):
            torch.testing.assert_close(tables.state(number), twin.state(), rtol=0, atol=0)
    assert len(shared) == num_here
    assert asked[Kind.EXCHANGE] == SERVERS * num_steps
    is_seen = num_here == SERVERS
    assert asked[Kind.PUSH_ROWS] == (0 if is_seen else SERVERS * num_steps)
    assert asked[Kind.READ_ROWS] == (0 if is_seen else 2 * SERVERS * num_steps)


@pytest.mark.parametrize("num_here", [SERVERS, 1])
def test_several_tables_are_one_request_to_each_server(num_here: int, asked: Counter[Kind]) -> None:
    keys = [torch.arange(600), torch.arange(50, 20, -1)]
    with group_of_one(num_here=num_here) as group:
        tables = group.open_tables(TABLES)
        tables.push(gradients_of(1), weight=1.0)
        group.exchange(PUSH)
        twins = [Table(spec) for spec in TABLES]
        for twin, given in zip(twins, gradients_of(1), strict=True):
            assert given is not None
            twin.update(given)
        rows = tables.read(dict(enumerate(keys)), is_fresh=True)
        for number, twin in enumerate(twins):
            assert torch.equal(rows[number], twin.read(keys[number]))
    assert asked[Kind.READ_ROWS] == (0 if num_here == SERVERS else SERVERS)


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "Cannot allocate memory"), PeerLost("no descriptor is left")])
def test_a_worker_that_can_map_nothing_asks_for_rows(
    error: Exception, asked: Counter[Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries a few times."""

    def refused(addresses: Sequence[BlockAddress], *, unit_bytes: int) -> NoReturn:
        raise error

    monkeypatch.setattr(rows_in_view, "side_by_side", refused)
    keys = torch.arange(600)
    with group_of_one(num_here=SERVERS) as group:
        tables = group.open_tables(TABLES)
        for _ in range(10):
            assert torch.equal(read(tables, 0, keys), Table(TABLES[0]).read(keys))
    assert asked[Kind.READ_ROWS] == 10 * SERVERS
    assert asked[Kind.SHOW_ROWS] == 3 * SERVERS


def test_gradients_are_let_go_once_they_are_pushed() -> None:
    with group_of_one(num_here=SERVERS) as group:
        group.open_tables(TABLES)
        given = [
            ({"weight": 1.0, "counts": [1, None]}, [torch.tensor([5]), torch.ones(1, DIM)]) for _ in range(SERVERS)
        ]
        kept = [weakref.ref(tensor) for _, tensors in given for tensor in tensors]
        group._client.take_along(given)
        del given
        group.exchange(PUSH)
        assert [each() for each in kept] == [None] * len(kept)


def test_bytes_count_as_if_messages_had_moved_them() -> None:
    keys = torch.arange(300)
    moved = []
    for num_here in (SERVERS, 0):
        with group_of_one(num_here=num_here) as group:
            tables = group.open_tables(TABLES)
            for some in (keys, keys[:1]):
                before = group.timing.moved_bytes
                read(tables, 0, some)
                moved.append(group.timing.moved_bytes - before)
    assert moved[:2] == moved[2:] == [300 * (8 + 4 * DIM) + 4 * HEAD_BYTES, 8 + 4 * DIM + 2 * HEAD_BYTES]


def test_gradients_that_make_no_sense_are_refused_with_their_push() -> None:
    with group_of_one(num_here=SERVERS) as group:
        tables = group.open_tables(TABLES)
        tables.push([RowGradients(torch.tensor([5]), torch.full((1, DIM), torch.nan)), None], weight=1.0)
        with pytest.raises(WireError, match="table 'users': the gradient of key 5 is not finite"):
            group.exchange(PUSH)


def test_rows_of_nobodys_tables_are_refused() -> None:
    with group_of_one(num_here=SERVERS) as group:
        group._client.take_along([(about, []) for about in ({"weight": 1.0, "counts": [None]}, {})])
        with pytest.raises(WireError, match="refused PUSH_ROWS"):
            group.exchange(PUSH)
