"""Columns in which each key has an entry: a table's rows and what is kept of them, or what is known of keys without."""

from collections.abc import Collection, Mapping
from typing import Any, final

import torch
from torch import Tensor

from paceline.server.tables import stepping
from paceline.server.tables.slots import slots_for
from paceline.server.tables.spec import Width
from paceline.server.tables.storage import Storage

KEYS = "keys"
KEY_BYTES = 8
_LEAST = 64


@final
class Entries:
    """Keys have slots from 0 on, in the order in which they came. Where some go, the last ones get their slots.

    Args:
        num_keys: keys are below it.
        seen: columns that other processes of this host see, with the index, if they see any.
    """

    def __init__(
        self, storage: Storage, widths: Mapping[str, Width], *, num_keys: int, seen: Collection[str] = ()
    ) -> None:
        self._storage, self.widths = storage, widths
        self._slots = slots_for(num_keys, storage, is_seen=bool(seen))
        self._keys = storage.column(_LEAST, 1, torch.int64)
        self._columns = {
            name: storage.column(_LEAST, num, dtype, is_seen=name in seen) for name, (num, dtype) in widths.items()
        }
        self._seen = seen

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def entry_bytes(self) -> int:
        """How much memory one key takes, without the index."""
        return KEY_BYTES + sum(num * dtype.itemsize for num, dtype in self.widths.values())

    def plain_view(self) -> dict[str, Any]:
        """Where other processes of this host find the index and the columns that they see, as plain data."""
        columns = {name: self._columns[name].address for name in self._seen}
        return {"index": self._slots.addresses, "columns": columns}

    def find(self, keys: Tensor) -> Tensor:
        """The slot of each key; -1 where it has none."""
        return self._slots.find(keys)

    def column(self, name: str) -> Tensor:
        """All entries of a column, in the order of their slots; no copy."""
        return self._columns[name].values[: len(self)]

    def memory(self, name: str) -> Tensor:
        """The column's whole memory, also what no slot has yet."""
        return self._columns[name].values

    def at(self, slots: Tensor, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Copies of these entries, by column; of all columns if none are named."""
        columns = self._columns if names is None else {name: self._columns[name] for name in names}
        return stepping.copies({name: column.values for name, column in columns.items()}, slots)

    def put(self, slots: Tensor, entries: Mapping[str, Tensor]) -> None:
        with self._storage.changing():
            stepping.put({name: column.values for name, column in self._columns.items()}, slots, entries)

    def add(self, keys: Tensor, entries: Mapping[str, Tensor | float]) -> Tensor:
        """Give these keys, which are all different and have none yet, entries with these values; returns the slots."""
        begin, end = len(self), len(self) + len(keys)
        with self._storage.changing():
            for column in (self._keys, *self._columns.values()):
                column.reserve(end)
            slots = self._slots.add(keys)
            self._keys.values[begin:end, 0] = keys
            for name, value in entries.items():
                self._columns[name].values[begin:end] = value
        return slots

    def drop(self, slots: Tensor) -> None:
        """Forget the entries in these slots, which are all different."""
        if not len(slots):
            return
        num = len(self) - len(slots)
        stays = torch.ones(len(slots), dtype=torch.bool)
        stays[slots[slots >= num] - num] = False
        moved, to = num + stays.nonzero()[:, 0], slots[slots < num]
        keys = self._keys.values[:, 0]
        with self._storage.changing():
            self._slots.remove(keys[slots], moved=keys[moved], to=to)
            for column in (self._keys, *self._columns.values()):
                column.values[to] = column.values[moved]
        self._storage.trim()

    def some(self, start: int, stop: int) -> dict[str, Tensor]:
        """Keys and columns of the slots from `start` to before `stop`, as far as there are any; no copies."""
        return {KEYS: self.keys[start:stop], **{name: self.column(name)[start:stop] for name in self._columns}}

    @property
    def keys(self) -> Tensor:
        """The keys, in the order of their slots; no copy."""
        return self._keys.values[: len(self), 0]

    def in_order(self) -> dict[str, Tensor]:
        """Keys and columns, in the order of the keys, as copies."""
        keys, order = self.keys.sort()
        return {KEYS: keys, **self.at(order)}
