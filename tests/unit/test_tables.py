"""Tables of rows: hashing, slots, states and files."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import NotWritten, UsageError
from paceline.messages import Kind, Message, WireError
from paceline.server.tables.dividing import divided, joined
from paceline.server.tables.hashing import mixed, normal, owners
from paceline.server.tables.shards import TableShards
from paceline.server.tables.slots import HashedSlots, slots_for
from paceline.server.tables.spec import RowGradients, TableSpec, are_different
from paceline.server.tables.storage import Column, InFiles, InMemory, TableFiles
from paceline.server.tables.table import Table
from tests.unit.one_table import BATCHES, DIM, KEYS, NUM_ROWS, SIZES, Net, gradients_of, spec_of

# --- hashing -------------------------------------------------------------------------------------------------------


@given(key=KEYS)
def test_keys_are_mixed_as_splitmix64_does(key: int) -> None:
    most = 2**64 - 1
    z = (key + 0x9E3779B97F4A7C15) & most
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & most
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & most
    z ^= z >> 31
    assert int(mixed(torch.tensor([key]))) & most == z
    for servers in (1, 3, 200):
        assert int(owners(torch.tensor([key]), servers)) == (z >> 32) * servers >> 32


def test_servers_own_about_as_many_keys() -> None:
    counts = owners(torch.arange(30_000), 3).bincount()
    assert counts.max() < 1.03 * counts.min()


def test_first_values_are_normal_and_differ() -> None:
    draws = normal(torch.arange(10_000), seed=9, num=4)
    assert abs(float(draws.mean())) < 0.02
    assert float(draws.var()) == pytest.approx(1.0, rel=0.03)
    assert torch.corrcoef(draws.T).fill_diagonal_(0).abs().max() < 0.04
    assert len(draws[:, 0].unique()) == len(draws)
    assert (normal(torch.arange(10_000), seed=10, num=1)[:, 0] - draws[:, 0]).abs().min() > 0
    torch.testing.assert_close(normal(torch.tensor([77]), seed=9, num=4)[0], draws[77], rtol=0, atol=0)


# --- tables --------------------------------------------------------------------------------------------------------


@given(keys=st.lists(st.integers(0, 30) | KEYS, max_size=40), spread=st.sampled_from([1, 64, 2**20]))
def test_keys_that_come_twice_are_found(keys: list[int], spread: int) -> None:
    """Also where the low bits of different ones are the same."""
    tensor = torch.tensor(keys, dtype=torch.int64) * spread
    assert are_different(tensor) == (len(tensor.unique()) == len(keys))


def test_rows_take_memory_from_their_first_update_on() -> None:
    table = Table(spec_of(num_rows=2**63))
    keys = torch.tensor([0, 2**63 - 1, 5])
    first = table.read(keys)
    assert len(table) == 0
    table.update(RowGradients(keys[:2], torch.zeros(2, DIM, dtype=torch.float64)))
    assert len(table) == 2
    torch.testing.assert_close(table.read(keys), first, rtol=0, atol=0)


@settings(max_examples=10, deadline=None)
@given(batches=BATCHES, before=st.integers(1, 4), after=st.integers(1, 4), num_rows=SIZES)
def test_a_state_goes_to_any_number_of_servers(
    batches: list[list[int]], before: int, after: int, num_rows: int
) -> None:
    net, other = (
        Net(spec_of("adam:lr=0.1", seed=seed, num_rows=num_rows), num_servers=num)
        for seed, num in ((4, before), (5, after))
    )
    for number, keys in enumerate(batches):
        net.update({0: (1.0, gradients_of(keys, number))})
    other.load(net.state())
    found = gradients_of(list(range(NUM_ROWS)), 99)
    for each in (net, other):
        each.update({0: (1.0, found)})
    torch.testing.assert_close(other.read(range(NUM_ROWS)), net.read(range(NUM_ROWS)), rtol=0, atol=0)
    state = net.state()
    for name, tensor in joined(divided(state, 3)).items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=0)


@settings(max_examples=8, deadline=None)
@given(batches=BATCHES, before=st.integers(1, 4), after=st.integers(1, 4))
def test_files_of_rows_go_to_any_number_of_servers(batches: list[list[int]], before: int, after: int) -> None:
    """Two rows a file, in this test."""
    net, other = (Net(spec_of("adam:lr=0.1", seed=seed), num_servers=num) for seed, num in ((4, before), (5, after)))
    for number, keys in enumerate(batches):
        net.update({0: (1.0, gradients_of(keys, number))})
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.server.tables.table._SAVED_BYTES", 2 * 3 * DIM * 8)
        directory = Path(place, "rows-7-0123abcd")
        files = net.save(directory)
        assert len(files) >= len({key for keys in batches for key in keys}) / 2
        assert {file.name for file in files} == {path.name for path in directory.iterdir()}
        other.load_files(directory, files)
    state = net.state()
    torch.testing.assert_close(state, other.state(), rtol=0, atol=0)


@settings(max_examples=8, deadline=None)
@given(batches=BATCHES, before=st.integers(1, 3), after=st.integers(1, 3), gone=st.sets(st.integers(0, 5)))
def test_changed_rows_follow_those_of_earlier_files(
    batches: list[list[int]], before: int, after: int, gone: set[int]
) -> None:
    """A file is written once, and has a name in each directory, of which any may be gone."""
    net, other = (Net(spec_of("adam:lr=0.1", seed=seed), num_servers=num) for seed, num in ((4, before), (5, after)))
    net.update({0: (1.0, gradients_of(list(range(NUM_ROWS)), 7))})
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.server.tables.table._SAVED_BYTES", 2 * 3 * DIM * 8)
        states = []
        for number, keys in enumerate(batches):
            net.update({0: (1.0, gradients_of(keys, number))})
            directory = Path(place, f"rows-{number}-0123abcd")
            states.append((directory, net.save(directory), net.state()))
            if number in gone and number:
                shutil.rmtree(states.pop(-2)[0])
        for directory, files, state in states:
            assert {file.name for file in files} == {path.name for path in directory.iterdir()}
            other.load_files(directory, files)
            torch.testing.assert_close(state, other.state(), rtol=0, atol=0)


def test_rows_that_stay_are_not_written_again(tmp_path: Path) -> None:
    table = Table(spec_of())
    table.update(gradients_of(list(range(NUM_ROWS)), 0))
    written = [table.save(tmp_path / "rows-0-00000000")]
    for number in range(1, 20):
        table.update(gradients_of([number % NUM_ROWS], number))
        written.append(table.save(tmp_path / f"rows-{number}-00000000"))
    assert [max(file.later for file in files) for files in written[:8]] == [0, 1, 2, 3, 4, 5, 6, 0]
    rows = torch.load(tmp_path / "rows-3-00000000" / written[3][-1].name)
    assert rows["keys"].tolist() == [3]
    assert (tmp_path / "rows-6-00000000" / written[0][0].name).stat().st_nlink == 7
    other = Table(spec_of())
    other.load_files(tmp_path / "rows-3-00000000", written[3])
    other.update(gradients_of([5], 0))
    assert other.save(tmp_path / "rows-3-00000001")[:-1] == written[3]  # also in a run that is resumed
    assert max(file.later for file in other.save(tmp_path / "rows-3-00000002", number=1)) == 0
    for name in ("min_count", "max_rows"):  # what waits, or goes, is written each time
        other = Table(spec_of(**{name: 2}))
        other.update(gradients_of([1, 2], 0))
        assert [file.later for _ in range(2) for file in other.save(tmp_path / "rows-0-00000001")] == [0, 0]


def test_without_room_for_what_has_changed_all_rows_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ends neither an update of rows that are there nor a checkpoint that is written."""

    def refuse(*_: object, **__: object) -> None:
        raise UsageError("no room")

    table = Table(spec_of(), InFiles(TableFiles(str(tmp_path / "table"), 1 << 30)))
    table.update(gradients_of(list(range(NUM_ROWS)), 0))
    table.save(tmp_path / "rows-0-00000000")
    assert table._saved is not None
    monkeypatch.setattr(table._saved._has_changed, "reserve", refuse)
    monkeypatch.setattr(InFiles, "column", refuse)
    for number in (1, 2):
        table.update(gradients_of([number], number))
        assert [file.later for file in table.save(tmp_path / f"rows-{number}-00000000")] == [0]


def test_a_file_of_rows_that_is_damaged_or_gone_is_named(tmp_path: Path) -> None:
    net = Net(spec_of(), num_servers=2)
    net.update({0: (1.0, gradients_of([1, 2, 3, 4], 0))})
    files = net.save(tmp_path / "rows-1-00000000")
    damaged = tmp_path / "rows-1-00000000" / files[1].name
    content = bytearray(damaged.read_bytes())
    for change in (content[:-1], content[:40] + bytes([content[40] ^ 1]) + content[41:], None):
        damaged.unlink() if change is None else damaged.write_bytes(change)
        with pytest.raises(WireError, match=f"{damaged}"):
            net.load_files(damaged.parent, files)
    assert len(net.state()["keys"]) == 4


@pytest.mark.parametrize("name", ["rows", "rows-1-00000000/../../x", "rows-1-0000000g"])
def test_rows_go_to_no_other_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(WireError, match="rows are not written to"):
        Net(spec_of(), num_servers=1).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_a_server_does_not_see_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotWritten, match=f"server 0: its host has no such directory in {tmp_path}/none"):
        Net(spec_of(), num_servers=1).save(tmp_path / "none" / "rows-1-00000000")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda state: state.pop("sum"), "has no 'sum'"),
        (lambda state: state.update(more=state["sum"]), "it has 'more'"),
        (lambda state: state.update(rows=state["rows"].float()), "its 'rows' are torch.float32"),
        (lambda state: state.update(rows=state["rows"][:, :2]), r"'rows' are torch.float64 of shape \(2, 2\)"),
        (lambda state: state["keys"].fill_(NUM_ROWS), f"none of key {NUM_ROWS}"),
        (lambda state: state["keys"].fill_(1), "a key comes twice"),
    ],
)
def test_a_state_of_another_table_is_refused(change: Callable[[dict[str, Tensor]], object], error: str) -> None:
    table = Table(spec_of())
    table.update(gradients_of([1, 2], 0))
    state = table.state()
    change(state)
    with pytest.raises(UsageError, match=f"table .users.*{error}"):
        table.load(state)
    assert table.state()["keys"].tolist() == [1, 2]


def test_a_state_with_keys_of_32_bits_fits() -> None:
    table, other = Table(spec_of()), Table(spec_of())
    table.update(gradients_of([1, 2], 0))
    other.load({**table.state(), "keys": table.state()["keys"].int()})
    assert torch.equal(other.read(torch.arange(4)), table.read(torch.arange(4)))


@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        ([NUM_ROWS], torch.zeros(1, DIM), f"table 'users' has rows 0 to 11, and none of key {NUM_ROWS}"),
        ([-3], torch.zeros(1, DIM), "none of key -3"),
        ([4, 4], torch.zeros(2, DIM), "table 'users': a key comes twice"),
        ([4, 5], torch.tensor([[0.0] * DIM, [math.nan] * DIM]), "table 'users': the gradient of key 5 is not finite"),
        ([4], torch.zeros(1, DIM + 1), r"of shape \(1, 4\)"),
        ([4], torch.zeros(1, DIM, dtype=torch.float32), "not torch.float32"),
    ],
)
def test_an_update_that_cannot_be_is_refused(keys: list[int], values: Tensor, error: str) -> None:
    table = Table(spec_of())
    values = values.double() if "float32" not in error else values
    with pytest.raises(UsageError, match=error):
        table.require(RowGradients(torch.tensor(keys), values))


@settings(max_examples=20, deadline=None)
@given(
    batches=st.lists(st.sets(st.one_of(KEYS, st.integers(0, 3000)), max_size=300), max_size=6),
    num_keys=st.sampled_from([3001, 2**63]),
)
def test_keys_have_the_slots_of_their_order(batches: list[set[int]], num_keys: int) -> None:
    slots, known = slots_for(num_keys), dict[int, int]()
    for batch in batches:
        keys = torch.tensor(sorted(key for key in batch if key < num_keys), dtype=torch.int64)
        assert slots.find(keys).tolist() == [known.get(key, -1) for key in keys.tolist()]
        new = [key for key in keys.tolist() if key not in known]
        known |= {key: slot for slot, key in enumerate(new, len(known))}
        assert slots.add(torch.tensor(new, dtype=torch.int64)).tolist() == [known[key] for key in new]
        assert slots.find(torch.tensor(list(known), dtype=torch.int64)).tolist() == list(range(len(slots)))


def test_rows_are_read_by_the_keys_that_were_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on this host can change its memory meanwhile."""
    memory, checked = torch.tensor([3, 4]), TableSpec.checked

    def and_then_changed(spec: TableSpec, keys: Tensor) -> Tensor:
        found = checked(spec, keys)
        memory.fill_(-1)
        return found

    shards = TableShards()
    shards.receive(Message(Kind.OPEN_TABLES, 1, 0, body={"tables": [spec_of().plain()], "num_servers": 1}))
    wanted = Table(spec_of()).read(memory.clone())
    monkeypatch.setattr(TableSpec, "checked", and_then_changed)
    asked = Message(
        Kind.READ_ROWS, 1, 0, body={"tables": [0], "counts": [2]}, payload=[memoryview(memory.numpy()).cast("B")]
    )
    [rows] = shards.receive(asked)["payload"]
    assert bytes(rows) == wanted.numpy().tobytes()


def test_an_index_that_finds_no_room_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = InMemory()
    slots, made, num_made = HashedSlots(storage), storage.column, [0]
    keys = torch.arange(200)
    slots.add(keys[:100])

    def one(num: int, width: int, dtype: torch.dtype, *, is_seen: bool) -> Column:
        """The second one finds none."""
        num_made[0] += 1
        if num_made[0] > 1:
            raise UsageError("no room")
        return made(num, width, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "column", one)
        with pytest.raises(UsageError, match="no room"):
            slots.add(torch.arange(100, 10_000))
    assert len(slots) == 100
    assert torch.equal(slots.find(keys), torch.where(keys < 100, keys, -1))


def test_columns_in_memory_take_what_a_load_needs() -> None:
    column = InMemory().column(64, 2, torch.float32)
    for num, wanted in ((1000, 1000), (1001, 2000)):
        column.reserve(num)
        assert len(column.values) == wanted


def test_full_buckets_go_on_in_the_next_ones() -> None:
    """Also behind the last bucket, where the first one follows."""
    keys = torch.arange(200_000)
    last = keys[mixed(keys) & 63 == 63][:20]  # HashedSlots begins with 64 buckets
    slots = HashedSlots(InMemory())
    slots.add(last[:10])
    slots.add(last[10:])
    assert slots.find(last).tolist() == list(range(20))
    assert slots.find(keys[mixed(keys) & 63 == 63][20:30]).tolist() == [-1] * 10


@pytest.mark.parametrize("field", [{"num_rows": 0}, {"num_rows": 2**63 + 1}, {"dim": 0}, {"dim": 2.0}, {"std": -1.0}])
def test_a_table_out_of_range_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"table 'users': {next(iter(field))}"):
        spec_of(**field)
