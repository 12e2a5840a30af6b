"""Rows that workers on a server's host read themselves: the same as the server's, and never half of an update."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.servers.rows_in_view import RowsInView, RowsSeen
from paceline.errors import PeerLost, UsageError
from paceline.server.tables.dividing import divided
from paceline.server.tables.hashing import owners
from paceline.server.tables.row_optimizers import of_text
from paceline.server.tables.spec import RowGradients, TableSpec
from paceline.server.tables.table import Table

FORKS = multiprocessing.get_context("fork")  # the reader of a test starts at once
DIM = 3
SPECS = [
    TableSpec("users", 2**63, DIM, of_text("adagrad:lr=0.1"), seed=4),
    TableSpec("items", 1000, DIM, of_text("sgd:lr=1"), std=0.0, dtype=torch.float64),
]
KEYS = st.one_of(st.integers(0, 999), st.integers(0, 2**63 - 1))


class Servers:
    """Some, and a worker that looks at their rows."""

    def __init__(self, num_servers: int) -> None:
        self.storages = [RowsInView() for _ in range(num_servers)]
        self.tables = [[Table(spec, storage) for spec in SPECS] for storage in self.storages]
        self.seen = RowsSeen(SPECS, self.shown())

    def shown(self) -> list[dict[str, Any]]:
        return [
            {**storage.plain_view(), "tables": [table.plain_view() for table in tables]}
            for storage, tables in zip(self.storages, self.tables, strict=True)
        ]

    def update(self, number: int, gradients: RowGradients) -> None:
        owner = owners(gradients.keys, len(self.tables))
        for server, tables in enumerate(self.tables):
            own = owner == server
            if own.any():
                tables[number].update(RowGradients(gradients.keys[own], gradients.values[own]))

    def read(self, number: int, keys: Tensor) -> Tensor:
        if self.seen.is_outdated:
            assert self.seen.read(number, keys) is None
            self.seen = RowsSeen(SPECS, self.shown())
        rows = self.seen.read(number, keys)
        assert rows is not None
        return rows


def gradients_of(keys: set[int], number: int, seed: int) -> RowGradients:
    spec = SPECS[number]
    values = torch.randn(len(keys), DIM, generator=torch.Generator().manual_seed(seed), dtype=spec.dtype)
    return RowGradients(torch.tensor(sorted(keys), dtype=torch.int64), values)


@settings(max_examples=25, deadline=None)
@given(
    batches=st.lists(st.tuples(st.sets(KEYS, max_size=200), st.integers(0, 1)), max_size=6),
    num_servers=st.integers(1, 4),
)
def test_rows_are_those_of_the_servers(batches: list[tuple[set[int], int]], num_servers: int) -> None:
    """Also while tables grow, and of rows that were never updated."""
    servers, twins = Servers(num_servers), [Table(spec) for spec in SPECS]
    known = torch.arange(0, 1000, 7)
    for seed, (keys, number) in enumerate(batches):
        keys = {key for key in keys if key < SPECS[number].num_rows}
        found = gradients_of(keys, number, seed)
        servers.update(number, found)
        twins[number].update(found)
        for some in (known, found.keys, found.keys.flip(0), found.keys[:2]):
            assert torch.equal(servers.read(number, some), twins[number].read(some))
            assert servers.seen.num_read == len(owners(some, num_servers).unique())


@settings(max_examples=15, deadline=None)
@given(batches=st.lists(st.sets(st.integers(0, 99), max_size=30), max_size=8), num_rows=st.sampled_from([100, 2**63]))
def test_rows_that_go_are_seen_no_more(batches: list[set[int]], num_rows: int) -> None:
    """Nor where others have come in their places."""
    spec = TableSpec("users", num_rows, DIM, of_text("sgd:lr=1"), seed=4, max_rows=20)
    storage, twin, keys = RowsInView(), Table(spec), torch.arange(100)
    table = Table(spec, storage)
    seen = RowsSeen([spec], [{**storage.plain_view(), "tables": [table.plain_view()]}])
    for seed, some in enumerate(batches):
        for each in (table, twin):
            each.update(gradients_of(some, 0, seed))
        if seen.is_outdated:
            seen = RowsSeen([spec], [{**storage.plain_view(), "tables": [table.plain_view()]}])
        rows = seen.read(0, keys)
        assert rows is not None
        assert torch.equal(rows, twin.read(keys))


def test_rows_that_are_loaded_are_seen() -> None:
    servers, twin = Servers(2), Table(SPECS[0])
    servers.update(0, gradients_of({1, 2, 3}, 0, 0))
    twin.update(gradients_of({2, 3, 4, 2**60}, 0, 1))
    servers.read(0, torch.tensor([1]))
    for tables, state in zip(servers.tables, divided({**twin.state(), "seed": torch.tensor(77)}, 2), strict=True):
        tables[0].load(state)
    twin.load({**twin.state(), "seed": torch.tensor(77)})
    keys = torch.tensor([4, 1, 2**60, 2, 99])
    assert torch.equal(servers.read(0, keys), twin.read(keys))


def test_a_table_without_columns_that_were_shown_is_lost() -> None:
    servers = Servers(1)
    shown = servers.shown()
    servers.update(0, RowGradients(torch.arange(10_000), torch.zeros(10_000, DIM)))
    with pytest.raises(PeerLost):
        RowsSeen(SPECS, shown)


def test_a_server_that_changes_rows_all_the_time_is_asked() -> None:
    servers = Servers(2)
    keys = torch.arange(5)
    with servers.storages[1].changing():
        assert servers.seen.read(0, keys) is None
    assert servers.seen.read(0, keys) is not None


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def grown(optimizer: str) -> tuple[RowsInView, Table]:
    """A table that has grown several times."""
    storage = RowsInView()
    table = Table(TableSpec("users", 2**63, DIM, of_text(optimizer)), storage)
    for some in torch.arange(3000).split(500):
        table.update(RowGradients(some, torch.ones(500, DIM)))
    return storage, table


def test_only_what_workers_read_is_shared() -> None:
    """Two columns of the index, and the rows: one file each. What an optimizer keeps of rows is nobody else's."""
    before = open_files()
    kept = [grown(optimizer) for optimizer in ("sgd:lr=1", "adam:lr=0.1")]
    assert open_files() - before == 2 * (1 + 3)  # and each server's board
    assert len({storage.plain_view()["num_columns"] for storage, _ in kept}) == 1


def test_too_few_files_are_named() -> None:
    """As where `ulimit -n` is low."""
    storage = RowsInView()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(UsageError, match=r"no room for \d+ bytes of a table in memory: Too many .*ulimit -n"):
            Table(SPECS[0], storage)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_who_reads_rows_cannot_write_them() -> None:
    servers = Servers(1)
    view = servers.tables[0][0].plain_view()
    nonces = [address[3] for address in [*view["index"], *view["columns"].values()]]
    for nonce in nonces:
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"paceline-{nonce:016x}" in line]
        assert sorted(line.split()[1] for line in lines) == ["r--s", "rw-s"]  # the worker's, and the server's


@contextlib.contextmanager
def reader(servers: Servers, keys: Tensor) -> Iterator[Connection]:
    """Another process, which reads these keys' rows of the second table until it is ended. It sends what values there
    are among them whenever these are others than before."""
    own, its = FORKS.Pipe()
    process = FORKS.Process(target=keep_reading, args=(its, servers.shown(), keys))
    process.start()
    try:
        yield own
    finally:
        process.kill()
        process.join()


def keep_reading(parent: Connection, shown: list[dict[str, Any]], keys: Tensor) -> None:
    torch.set_num_threads(1)
    seen, last = RowsSeen(SPECS, shown), None
    while True:
        rows = seen.read(1, keys)
        if rows is not None and (values := rows.unique().tolist()) != last:
            parent.send(values)
            last = values


def test_nobody_sees_half_of_an_update() -> None:
    """Every update adds 1 to each element of all rows."""
    keys = torch.arange(900)
    ones = RowGradients(keys, -torch.ones(len(keys), DIM, dtype=torch.float64))
    servers = Servers(1)
    servers.update(1, ones)
    num_updates, until_s = 1, time.monotonic() + 60
    found: list[list[float]] = []
    with reader(servers, keys) as other:
        while len(found) < 50 and time.monotonic() < until_s:
            servers.update(1, ones)
            num_updates += 1
            while other.poll():
                found.append(other.recv())
    assert len(found) >= 50
    assert [values for values in found if len(values) != 1] == []
    assert found == sorted(found)
    assert servers.read(1, keys).unique().tolist() == [num_updates]
