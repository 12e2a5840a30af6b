"""Rows of tables in memory that workers on the server's host see, and read themselves; if they are lent, they update
them, too.

A sequence lock (Lameter, "Effective synchronization on Linux/NUMA systems", 2005): who changes entries makes a number
odd before, and even after. A worker that finds another number after reading than before reads again. Who changes
entries has a lock meanwhile, which outlives its owner. A worker that dies ends the run, so that nobody goes by the half
of an update that it may leave.
"""

import bisect
import contextlib
import itertools
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from paceline.comm.shared_memory import futex, mutex
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.comm.shared_memory.side_by_side import side_by_side
from paceline.server.tables import stepping
from paceline.server.tables.hashing import mixed, owners, owners_of
from paceline.server.tables.reading import rows_of
from paceline.server.tables.row_optimizers import RowOptimizer
from paceline.server.tables.slots import BUCKET_KEYS, are_few, find_hashed, find_listed
from paceline.server.tables.spec import ROWS, RowGradients, TableSpec
from paceline.server.tables.storage import Column, InMemory, no_room

_CHANGES, _COLUMNS = 0, 1  # 64-bit words of a board: odd while entries change; how often there were new columns
_WORDS_BYTES = 64
_PATIENCE_S = 2e-3  # an update of a few thousand rows takes a tenth
_TRIES = 8
_REMEDY = "have its rows on more servers with --option servers=N, or in files with --option table_dir=DIR"
T = TypeVar("T")


@final
class _Board:
    """Holds what a server shares with all workers on its host besides columns: the lock, and two counts that readers
    check."""

    def __init__(self, block: SharedBlock) -> None:
        self._memory = block.tensor
        self.words = block.buffer[mutex.MUTEX_BYTES :].cast("q")
        self.lock = mutex.RobustMutex(self._memory.data_ptr())


@contextlib.contextmanager
def changing(boards: Collection[_Board]) -> Iterator[None]:
    """Entries of these servers change. Their locks must be held."""
    for board in boards:
        board.words[_CHANGES] |= 1  # which a worker that was killed may have left so
    futex.fence()
    try:
        yield
    finally:
        futex.fence()
        for board in boards:
            board.words[_CHANGES] += 1


@final
class RowsInView(InMemory):
    """A server's end."""

    lends = mutex.IS_AVAILABLE

    def __init__(self) -> None:
        block = SharedBlock.create(mutex.MUTEX_BYTES + _WORDS_BYTES)
        weakref.finalize(self, block.close)
        if self.lends:
            mutex.prepare(block.tensor.data_ptr())
        self._address, self._board = astuple(block.address), _Board(block)

    def plain_view(self) -> dict[str, Any]:
        return {"board": self._address, "num_columns": self._board.words[_COLUMNS]}

    def column(self, num: int, width: int, dtype: torch.dtype, *, is_seen: bool = False) -> Column:
        return _Shared(self, num, width, dtype) if is_seen else super().column(num, width, dtype)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return self._board.lock if self.lends else contextlib.nullcontext()

    def changing(self) -> contextlib.AbstractContextManager[None]:
        return changing((self._board,))

    def announce(self) -> None:
        """Say that there is a column that workers do not know."""
        self._board.words[_COLUMNS] += 1
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


class Found(NamedTuple):
    """Where a table's rows are, all of which are made."""

    keys: Tensor
    places: Any
    """For each key, its place in one view of the servers."""
    starts: Any
    """Where each server's rows begin in this view."""


class _Looked(NamedTuple):
    """Where rows are in one view."""

    places: Any
    """For each key, where its row is among those of all servers; below 0 where it has none."""
    are_made: bool
    """All have one."""


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
        self._boards = [_Board(SharedBlock.open(BlockAddress(*each["board"]))) for each in shown]
        self._num_columns = [each["num_columns"] for each in shown]
        self.num_read = 0
        """Servers that had rows of the keys that were read last."""
        self._tables = [
            _SideBySide(spec, [each["tables"][number] for each in shown]) for number, spec in enumerate(specs)
        ]
        self._last: dict[int, tuple[Tensor, _Looked]] = {}  # by table, the keys that were read last, and their places

    @property
    def is_outdated(self) -> bool:
        """Whether a server has columns that this does not know."""
        return [board.words[_COLUMNS] for board in self._boards] != self._num_columns

    def look(self, table: int, keys: Tensor) -> Tensor | None:
        """A copy of the rows of these keys, none of which has changed meanwhile. None: the servers are to be asked,
        which change them all the time, or have new columns."""
        own = self._tables[table]
        looked = self._unchanged(lambda: own.read(keys))
        return None if looked is None else looked[1]

    def read(self, table: int, keys: Tensor) -> Tensor | None:
        """Does what `look` does for keys of which none comes twice, and keeps their places for `find`."""
        own = self._tables[table]
        looked = self._unchanged(lambda: own.read(keys))
        if looked is None:
            return None
        found, rows = looked
        self._last[table] = keys, found
        self.num_read = own.num_asked(keys, found)
        return rows

    def find(self, table: int, keys: Tensor) -> Found | None:
        """Where these rows are, for `update`; none: they are not this worker's to update, or some are yet to be made,
        or as `read`."""
        own, (known, looked) = self._tables[table], self._last.get(table, (None, None))
        if not own.is_lent or self.is_outdated:
            return None
        if known is not keys:
            looked = self._unchanged(lambda: own.places(keys))
        return Found(keys, looked.places, own.starts) if looked is not None and looked.are_made else None

    def update(self, table: int, found: Found, values: Tensor, optimizer: RowOptimizer, servers: Sequence[int]) -> bool:
        """Make an update of those of these rows that the servers have; false, and nothing done, where one has new
        columns.

        Args:
            found: of this or an earlier view of the servers.
            values: of the rows' gradients.
            servers: in their order, in which everybody takes their locks.
        """
        boards = {server: self._boards[server] for server in servers}
        with mutex.all_of([board.lock for board in boards.values()]):
            if any(board.words[_COLUMNS] != self._num_columns[server] for server, board in boards.items()):
                return False
            self._tables[table].update(found, values, optimizer, boards)
        return True

    def _unchanged(self, look: Callable[[], T]) -> T | None:
        """What this gives while nothing changes; none, as `read`."""
        until_s = time.perf_counter() + _PATIENCE_S
        for _ in range(_TRIES):
            changes = [board.words[_CHANGES] for board in self._boards]
            while any(number % 2 for number in changes):
                if time.perf_counter() > until_s:
                    return None
                os.sched_yield()
                changes = [board.words[_CHANGES] for board in self._boards]
            futex.fence()
            seen = look()
            futex.fence()
            if self.is_outdated:
                return None
            if changes == [board.words[_CHANGES] for board in self._boards]:
                return seen
        return None


@final
class _SideBySide:
    """A table's parts on all servers, in which rows are found at once."""

    def __init__(self, spec: TableSpec, shown: Sequence[Mapping[str, Any]]) -> None:
        self._spec, self._seed = spec, shown[0]["seed"]
        self.is_lent = all(each["is_lent"] for each in shown)
        index = [[BlockAddress(*address) for address in each["index"]] for each in shown]
        self._index = (_Listed if are_few(spec.num_rows) else _Hashed)(*zip(*index, strict=True))
        names = shown[0]["columns"] if self.is_lent else (ROWS,)
        # Columns have grown together, so that a row's entry has the same place in each.
        columns = {name: self._side_by_side(name, shown) for name in names}
        self._columns = {name: column for name, (column, _) in columns.items()}
        self._rows, self._first_rows = columns[ROWS]
        self.starts = _array(self._first_rows)
        self._num_updates = [
            SharedBlock.open(BlockAddress(*each["num_updates"])).buffer.cast("q")
            for each in (shown if self.is_lent else ())
        ]
        stays = are_few(spec.num_rows) and not spec.evicts
        # By key, the place of its row and 1 more, where it stays; 0: look it up.
        self._known = torch.zeros(spec.num_rows, dtype=torch.int32) if stays else None

    def read(self, keys: Tensor) -> tuple[_Looked, Tensor]:
        """See `places`, and a copy of the rows there."""
        found = self.places(keys)
        return found, rows_of(self._spec, self._rows, keys, found.places, seed=self._seed, are_made=found.are_made)

    def places(self, keys: Tensor) -> _Looked:
        places = self._look_up(keys) if self._known is None else find_listed(keys, self._known).numpy()
        are_made = _are_all_there(places)
        if self._known is not None and not are_made:
            (new,) = (places < 0).nonzero()
            places[new] = self._look_up(keys[new])
            self._known[keys[new]] = torch.from_numpy(places[new] + 1).int()
            are_made = _are_all_there(places)
        return _Looked(places, are_made)

    def _look_up(self, keys: Tensor) -> Any:
        """The places of these keys, by the servers' indices."""
        hashed = mixed(keys)
        owner = owners_of(hashed, len(self._first_rows)).numpy()
        slots = self._index.find(keys, hashed, owner).numpy()
        return np.where(slots < 0, slots, slots + self.starts.take(owner))

    def num_asked(self, keys: Tensor, found: _Looked) -> int:
        """How many servers have these rows, or would make them."""
        places, starts = found.places, self._first_rows
        if not found.are_made:
            return len(owners(keys, len(starts)).unique())
        if not len(places):
            return 0
        first, last = (bisect.bisect(starts, place) for place in (places.min(), places.max()))
        between = itertools.pairwise(starts[first:last])
        return 1 + (last > first) + sum(bool(((places >= start) & (places < stop)).any()) for start, stop in between)

    def update(self, found: Found, values: Tensor, optimizer: RowOptimizer, boards: Mapping[int, _Board]) -> None:
        """As `Table.update` of each of these servers, whose locks must be held."""
        by_number = defaultdict(list)
        for server in boards:  # those of whose rows there are none, too
            self._num_updates[server][0] += 1
            by_number[self._num_updates[server][0]].append(server)
        for number, servers in by_number.items():
            keys, places, some = found.keys, found.places, values
            if len(servers) < len(self.starts) or found.starts is not self.starts:
                owner = found.starts.searchsorted(places, side="right") - 1
                (own,) = np.isin(owner, servers).nonzero()
                shift = (self.starts - found.starts).take(owner)
                keys, places, some = keys[own], (places + shift)[own], some[own]
            slots, gradients = torch.from_numpy(places), RowGradients(keys, some)
            entries = stepping.copies(self._columns, slots)
            stepping.step(self._spec, optimizer, entries, gradients, seed=self._seed, number=number)
            with changing([boards[server] for server in servers]):
                stepping.put(self._columns, slots, entries)

    def _side_by_side(self, name: str, shown: Sequence[Mapping[str, Any]]) -> tuple[Tensor, list[int]]:
        """A column of all servers, and the entry that each one's begins with."""
        width = self._spec.columns[name]
        addresses = [BlockAddress(*each["columns"][name]) for each in shown]
        entry_bytes = width.num * width.dtype.itemsize
        memory, firsts = side_by_side(addresses, unit_bytes=entry_bytes, is_written=self.is_lent)
        whole = memory[: len(memory) // entry_bytes * entry_bytes]
        return whole.view(width.dtype).view(-1, width.num), firsts


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


def _are_all_there(places: Any) -> bool:
    return bool(np.minimum.reduce(places, initial=0) >= 0)


def _array(numbers: Sequence[int]) -> Any:
    return torch.tensor(numbers).numpy()
