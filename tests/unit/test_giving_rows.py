"""All rows of tables go to another server, some at a time, while updates go on: it then has what is here."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.server.tables import giving
from paceline.server.tables.giving import Giving
from paceline.server.tables.spec import RowGradients, TableSpec
from paceline.server.tables.storage import InFiles, InMemory, Storage, TableFiles
from paceline.server.tables.table import Table
from tests.unit.one_table import DIM, NUM_ROWS, gradients_of, spec_of

KINDS: list[dict[str, Any]] = [
    {},
    {"optimizer": "adam:lr=0.1", "num_rows": 2**60, "dtype": torch.bfloat16},
    {"min_count": 2},
    {"max_rows": 5},
    {"evict_after": 8, "num_rows": 2**60},
    {"min_count": 3, "max_rows": 4, "evict_after": 16},
]
TURNS = st.lists(st.one_of(st.none(), st.lists(st.integers(0, NUM_ROWS - 1), max_size=6)), max_size=40)
"""An update of these keys, or a piece that is sent."""


@pytest.fixture(autouse=True, scope="module")
def _one_row_a_piece() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(giving, "PIECE_BYTES", 1)
        yield


def update(table: Table, keys: list[int], number: int) -> None:
    spec, (given_keys, values) = table.spec, gradients_of(keys, number)
    table.update(RowGradients(given_keys, values.to(spec.computed)))


def take(copies: list[Table], states: dict[str, torch.Tensor]) -> None:
    for number, copy in enumerate(copies):
        start = f"{number}."
        copy.take_states({name.removeprefix(start): own for name, own in states.items() if name.startswith(start)})


def storages(in_files: bool, directory: str) -> tuple[Storage, Storage]:
    if not in_files:
        return InMemory(), InMemory()
    return InFiles(TableFiles(directory, 1)), InFiles(TableFiles(directory, 1))


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2),
    before=st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=8), max_size=8),
    turns=TURNS,
    after=st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=6), max_size=4),
    in_files=st.booleans(),
)
def test_a_copy_is_what_the_table_is(
    kinds: list[dict[str, Any]],
    before: list[list[int]],
    turns: list[list[int] | None],
    after: list[list[int]],
    in_files: bool,
) -> None:
    with TemporaryDirectory() as directory:
        own, others = storages(in_files, directory)
        specs = [spec_of(**kind) for kind in kinds]
        tables, copies = [Table(spec, own) for spec in specs], [Table(spec, others) for spec in specs]
        for number, keys in enumerate(before):
            update(tables[number % len(tables)], keys, number)
        going, is_whole = Giving(tables), False
        take(copies, going.changes())
        for number, keys in enumerate([*turns, *[None] * 100], start=len(before)):
            if keys is not None:
                update(tables[number % len(tables)], keys, number)
                take(copies, going.changes())
            elif (piece := going.piece()) is not None:
                take(copies, piece)
            else:
                is_whole = True
        assert is_whole
        going.close()
        for number, keys in enumerate(after, start=1000):
            for table in (tables[number % len(tables)], copies[number % len(tables)]):
                update(table, keys, number)
        for table, copy in zip(tables, copies, strict=True):
            state, its = table.state(), copy.state()
            assert state.keys() == its.keys()
            assert all(torch.equal(tensor, its[name]) for name, tensor in state.items())
            assert table.counts() == copy.counts()


def test_pieces_are_of_about_as_many_bytes_and_no_row_that_stands_still_goes_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = TableSpec("users", 10_000, DIM, spec_of().optimizer)
    table, keys = Table(spec), torch.arange(1000)
    table.update(RowGradients(keys, torch.ones(1000, DIM)))
    row_bytes = 8 + 2 * 4 * DIM
    monkeypatch.setattr(giving, "PIECE_BYTES", 100 * row_bytes)
    going, found = Giving([table]), []
    while (piece := going.piece()) is not None:
        assert sum(each.nbytes for name, each in piece.items() if each.dim() and name != "0.asked") == 100 * row_bytes
        found.append(piece["0.keys"])
    assert torch.equal(torch.cat(found).sort().values, keys)
