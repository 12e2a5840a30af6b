"""Rows that are made late, and rows that go again: what a table in plain dicts has, on any number of servers."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import UsageError
from paceline.server.tables.slots import HashedSlots, slots_for
from paceline.server.tables.spec import TableSpec
from paceline.server.tables.storage import InFiles, InMemory, TableFiles
from paceline.server.tables.table import Table
from tests.unit.one_table import BATCHES, KEYS, NUM_ROWS, SIZES, Net, gradients_of, spec_of

ALL = torch.arange(NUM_ROWS)


class Twin:
    """The same rule, a key at a time."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec, self.number = spec, 0
        self.first = Table(spec).read(ALL)
        self.rows: dict[int, Tensor] = {}
        self.last: dict[int, int] = {}
        self.waits: dict[int, tuple[int, int]] = {}
        self.dropped = self.evicted = 0

    def update(self, keys: list[int], seed: int) -> None:
        self.number += 1
        found = gradients_of(keys, seed)
        for key, gradient in zip(found.keys.tolist(), found.values, strict=True):
            count = self.waits.pop(key, (0, 0))[0] + 1
            if key not in self.rows and count < self.spec.min_count:
                self.waits[key] = (count, self.number)
                self.dropped += 1
                continue
            self.rows[key] = self.rows.get(key, self.first[key]) - 0.1 * gradient
            self.last[key] = self.number
        if self.spec.evict_after and self.number % max(1, self.spec.evict_after // 8) == 0:
            self._forget({key for key, last in self.last.items() if last <= self.number - self.spec.evict_after})
            is_old = {key for key, (_, last) in self.waits.items() if last <= self.number - self.spec.evict_after}
            self.waits = {key: waits for key, waits in self.waits.items() if key not in is_old}
        most = self.spec.max_rows
        if most and len(self.rows) > most:
            oldest = sorted(self.rows, key=lambda key: (self.last[key], key))
            self._forget(set(oldest[: len(oldest) - (most - most // 8)]))
        if most and len(self.waits) > most:
            oldest = sorted(self.waits, key=lambda key: (self.waits[key][1], key))
            for key in oldest[: len(oldest) - (most - most // 8)]:
                del self.waits[key]

    def _forget(self, keys: set[int]) -> None:
        self.evicted += len(keys)
        for key in keys:
            del self.rows[key], self.last[key]

    def read(self) -> Tensor:
        return torch.stack([self.rows.get(key, self.first[key]) for key in range(NUM_ROWS)])

    def counts(self) -> dict[str, int]:
        return {"rows": len(self.rows), "evicted": self.evicted, "waiting": len(self.waits), "dropped": self.dropped}


LIMITS = st.fixed_dictionaries({"min_count": st.integers(1, 3), "evict_after": st.none() | st.integers(1, 20)})
LONG = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=6), min_size=1, max_size=24)


@settings(max_examples=25, deadline=None)
@given(
    batches=LONG,
    limits=LIMITS,
    max_rows=st.none() | st.integers(1, 9),
    num_rows=SIZES,
    servers=st.integers(1, 3),
    after=st.data(),
)
def test_rows_are_those_of_the_rule(
    batches: list[list[int]], limits: dict[str, Any], max_rows: int | None, num_rows: int, servers: int, after: Any
) -> None:
    """Also where the state goes to other servers in between: as a message, or as files of two rows."""
    if max_rows is not None:
        servers, limits = 1, {**limits, "max_rows": max_rows}
    spec = spec_of("sgd:lr=0.1", num_rows=num_rows, **limits)
    twin, net = Twin(spec), Net(spec, num_servers=servers)
    moves_at = after.draw(st.integers(0, len(batches)))
    before: dict[str, int] = {}
    for number, keys in enumerate(batches):
        if number == moves_at:
            before = net.counts()
            net = moved(net, spec, num_servers=1 if max_rows else 4 - servers, in_files=after.draw(st.booleans()))
        twin.update(keys, number)
        net.update({0: (1.0, gradients_of(keys, number))})
        torch.testing.assert_close(net.read(range(NUM_ROWS)), twin.read(), rtol=0, atol=1e-12)
    counts = net.counts()
    for name in ("evicted", "dropped"):  # since this process has the table
        counts[name] += before.get(name, 0)
    assert counts == twin.counts()
    assert net.state()["keys"].tolist() == sorted(twin.rows)


def moved(net: Net, spec: TableSpec, *, num_servers: int, in_files: bool) -> Net:
    other = Net(spec, num_servers=num_servers)
    if not in_files:
        other.load(net.state())
        return other
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.server.tables.table._SAVED_BYTES", 80)
        directory = Path(place, "rows-7-0123abcd")
        other.load_files(directory, net.save(directory))
    return other


@settings(max_examples=6, deadline=None)
@given(batches=BATCHES)
def test_rows_in_files_go_too(batches: list[list[int]]) -> None:
    spec = spec_of("adagrad:lr=0.1", min_count=2, evict_after=2)
    with TemporaryDirectory() as place:
        tables = [Table(spec), Table(spec, InFiles(TableFiles(place, resident_bytes=-1)))]
        for number, keys in enumerate(batches):
            for table in tables:
                table.update(gradients_of(keys, number))
        assert torch.equal(tables[0].read(ALL), tables[1].read(ALL))


@settings(max_examples=20, deadline=None)
@given(
    added=st.sets(st.one_of(KEYS, st.integers(0, 3000)), min_size=1, max_size=300),
    removed=st.lists(st.integers(0, 299), max_size=200),
    num_keys=st.sampled_from([3001, 2**63]),
)
def test_slots_have_no_gap_where_keys_went(added: set[int], removed: list[int], num_keys: int) -> None:
    """The last ones are moved there, and the index finds them and those that come again."""
    slots, keys = slots_for(num_keys), torch.tensor(sorted({key % num_keys for key in added}))
    slots.add(keys)
    gone = torch.tensor(sorted({place for place in removed if place < len(keys)}), dtype=torch.int64)
    left = len(keys) - len(gone)
    stays = torch.ones(len(keys), dtype=torch.bool)
    stays[gone] = False
    moved, to = keys[left:][stays[left:]], gone[gone < left]
    slots.remove(keys[gone], moved=moved, to=to)
    assert len(slots) == left
    assert slots.find(keys[gone]).tolist() == [-1] * len(gone)
    assert slots.find(keys[stays]).sort().values.tolist() == list(range(left))
    assert torch.equal(slots.find(moved), to)
    assert slots.add(keys[gone]).tolist() == list(range(left, len(keys)))


def test_an_index_is_made_anew_seldom_while_keys_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, made = HashedSlots(InMemory()), list[int]()
    make = slots._make_places
    monkeypatch.setattr(slots, "_make_places", lambda num: (made.append(num), make(num)))
    keys = torch.arange(20_000)
    slots.add(keys[:200])
    for start in range(0, 15_000, 50):
        slots.remove(
            keys[start : start + 50],
            moved=keys[start + 50 : start + 200][slots.find(keys[start + 50 : start + 200]) >= 150],
            to=slots.find(keys[start : start + 50])[slots.find(keys[start : start + 50]) < 150],
        )
        slots.add(keys[start + 200 : start + 250])
    assert slots.find(keys[15_000:15_200]).sort().values.tolist() == list(range(200))
    assert max(made) == 128
    assert len(made) < 80


@pytest.mark.parametrize("limit", ["min_count", "evict_after", "max_rows"])
@pytest.mark.parametrize("value", [0, 1.5])
def test_limits_without_meaning_are_refused(limit: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"table 'users': {limit} must be a whole number from 1"):
        spec_of(**{limit: value})


def test_a_state_without_what_the_limits_need_is_refused() -> None:
    plain, limited = Table(spec_of()), Table(spec_of(min_count=2, evict_after=3))
    for table in (plain, limited):
        table.update(gradients_of([1, 2], 0))
    with pytest.raises(UsageError, match=r"has no '\w*last'"):
        limited.load(
            {**plain.state(), "waiting_keys": plain.state()["keys"], "waiting_count": torch.zeros(2, 1).long()}
        )
    with pytest.raises(UsageError, match="it has 'last', and a table of this one's settings none"):
        plain.load(limited.state())
