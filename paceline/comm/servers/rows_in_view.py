"""Rows of tables in memory that workers on the server's host see, and read themselves.

A sequence lock (Lameter, "Effective synchronization on Linux/NUMA systems", 2005): the server makes a number odd before
entries change, and even after. A worker that finds another number after reading than before reads again.
"""

import contextlib
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, final

import torch
from torch import Tensor

from paceline.comm.shared_memory import futex
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.comm.shared_memory.side_by_side import side_by_side
from paceline.server.tables.hashing import mixed, owners_of
from paceline.server.tables.reading import rows_of
from paceline.server.tables.slots import BUCKET_KEYS, are_few, find_hashed, find_listed
from paceline.server.tables.spec import TableSpec
from paceline.server.tables.storage import Column, InMemory, no_room

_CHANGES, _COLUMNS = 0, 1  # 64-bit words of a board: odd while entries change; how often there were new columns
_BOARD_BYTES = 64
_PATIENCE_S = 2e-3  # an update of a few thousand rows takes a tenth
_TRIES = 8
_REMEDY = "have its rows on more servers with --option servers=N, or in files with --option table_dir=DIR"


@final
class RowsInView(InMemory):
    """A server's end."""

    def __init__(self) -> None:
        block = SharedBlock.create(_BOARD_BYTES)
        weakref.finalize(self, block.close)
        self._board = astuple(block.address)
        self._words = block.buffer.cast("q")

    def plain_view(self) -> dict[str, Any]:
        return {"board": self._board, "num_columns": self._words[_COLUMNS]}

    def column(self, num: int, width: int, dtype: torch.dtype, *, is_seen: bool = False) -> Column:
        return _Shared(self, num, width, dtype) if is_seen else super().column(num, width, dtype)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        self._words[_CHANGES] += 1
        futex.fence()
        try:
            yield
        finally:
            futex.fence()
            self._words[_CHANGES] += 1

    def announce(self) -> None:
        """There is a column that workers do not know."""
        self._words[_COLUMNS] += 1
        futex.fence()


@final
class _Shared(Column):
    def __init__(self, storage: RowsInView, num: int, width: int, dtype: torch.dtype) -> None:
        self._storage, self._width, self._dtype = storage, width, dtype
        self._make(num)

    def reserve(self, num: int) -> None:
        if num > len(self.values):
            before, forget = self.values, self._forget
            self._make(max(num, 2 * len(before)))
            self.values[: len(before)] = before
            forget()

    def _make(self, num: int) -> None:
        num_bytes = num * self._width * self._dtype.itemsize
        try:
            block = SharedBlock.create(num_bytes)
        except OSError as error:
            raise no_room(error, f"{num_bytes} bytes of a table in memory", remedy=_REMEDY) from None
        self._forget = weakref.finalize(self, block.close)
        self.address = astuple(block.address)
        self.values = block.tensor.view(self._dtype).view(num, self._width)
        self._storage.announce()


@final
class RowsSeen:
    """A worker's end: the rows of all servers as they have shown them.

    Args:
        shown: by each server, in the order of their ranges.

    Raises:
        PeerLost: a server is gone, or has other columns meanwhile.
        OSError: this process may have no more memory.
    """

    def __init__(self, specs: Sequence[TableSpec], shown: Sequence[Mapping[str, Any]]) -> None:
        self._boards = [SharedBlock.open(BlockAddress(*each["board"])).buffer.cast("q") for each in shown]
        self._num_columns = [each["num_columns"] for each in shown]
        self.num_read = 0
        """Servers that had rows of the keys that were read last."""
        self._tables = [
            _SideBySide(spec, [each["tables"][number] for each in shown]) for number, spec in enumerate(specs)
        ]

    @property
    def is_outdated(self) -> bool:
        """Whether a server has columns that this does not know."""
        return [board[_COLUMNS] for board in self._boards] != self._num_columns

    def read(self, table: int, keys: Tensor) -> Tensor | None:
        """A copy of the rows of these keys, none of which has changed meanwhile; none: the servers are to be asked,
        which change them all the time, or have new columns."""
        hashed, until_s = mixed(keys), time.perf_counter() + _PATIENCE_S
        owner = owners_of(hashed, len(self._boards))
        for _ in range(_TRIES):
            changes = self._changes()
            while any(number % 2 for number in changes):
                if time.perf_counter() > until_s:
                    return None
                os.sched_yield()
                changes = self._changes()
            futex.fence()
            rows = self._tables[table].read(keys, hashed, owner)
            futex.fence()
            if self.is_outdated:
                return None
            if changes == self._changes():
                self.num_read = int(owner.bincount().count_nonzero())
                return rows
        return None

    def _changes(self) -> list[int]:
        return [board[_CHANGES] for board in self._boards]


@final
class _SideBySide:
    """A table's parts on all servers, in which rows are found at once."""

    def __init__(self, spec: TableSpec, shown: Sequence[Mapping[str, Any]]) -> None:
        self._spec, self._seed = spec, shown[0]["seed"]
        of_each = [[BlockAddress(*address) for address in each["columns"]] for each in shown]
        *index, rows = zip(*of_each, strict=True)
        self._index = _Listed(*index) if are_few(spec.num_rows) else _Hashed(*index)
        row_bytes = spec.dim * spec.dtype.itemsize
        of_rows, first_rows = side_by_side(rows, unit_bytes=row_bytes)
        self._rows = of_rows[: len(of_rows) // row_bytes * row_bytes].view(spec.dtype).view(-1, spec.dim)
        self._first_rows = _array(first_rows)

    def read(self, keys: Tensor, hashed: Tensor, owner: Tensor) -> Tensor:
        of = owner.numpy()
        slots = self._index.find(keys, hashed, of)
        return rows_of(self._spec, self._rows, keys, slots, seed=self._seed, begin=self._first_rows.take(of))


@final
class _Listed:
    """See `ListedSlots`."""

    def __init__(self, places: Sequence[BlockAddress]) -> None:
        of_places, first_places = side_by_side(places, unit_bytes=torch.int32.itemsize)
        self._places, self._first_places = of_places.view(torch.int32), _array(first_places)

    def find(self, keys: Tensor, hashed: Tensor, owner: Any) -> Tensor:
        """The slot of each key on its server, as `Slots.find`.

        Args:
            hashed: the keys, mixed.
        """
        return find_listed(keys, self._places, self._first_places.take(owner))


@final
class _Hashed:
    """See `HashedSlots`."""

    def __init__(self, keys: Sequence[BlockAddress], slots: Sequence[BlockAddress]) -> None:
        bucket_bytes = BUCKET_KEYS * torch.int64.itemsize
        of_keys, first_buckets = side_by_side(keys, unit_bytes=bucket_bytes)
        of_slots, _ = side_by_side(slots, unit_bytes=bucket_bytes)
        self._keys, self._slots = (each.view(torch.int64).view(-1, BUCKET_KEYS) for each in (of_keys, of_slots))
        self._first_buckets = _array(first_buckets)
        self._masks = _array([address.num_bytes // bucket_bytes - 1 for address in keys])

    def find(self, keys: Tensor, hashed: Tensor, owner: Any) -> Tensor:
        """As `_Listed.find`."""
        first_buckets, masks = self._first_buckets.take(owner), self._masks.take(owner)
        return find_hashed(keys, hashed, self._keys, self._slots, first_buckets, masks)


def _array(numbers: Sequence[int]) -> Any:
    return torch.tensor(numbers).numpy()
