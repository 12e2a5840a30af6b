"""Where a table's rows lie: from keys to slots, all keys of a batch at once.

A table of few keys has the slot of each in an array. One of many has a hash table.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from paceline.server.tables.hashing import mixed
from paceline.server.tables.storage import Address, Column, InMemory, Storage

_BUCKET_BITS = 3
BUCKET_KEYS = 1 << _BUCKET_BITS  # a cache line of them
_LEAST_BUCKETS = 64
_FULLEST = 0.4  # of all places; then 1 bucket in 60 is full (Poisson), and a key may lie in the one after it
_FREE, _GONE = 0, 1  # keys lie with all bits inverted, below 0, since new memory is 0
_NONE = -1
_PIECE_BUCKETS = 1 << 11
_FEW_KEYS = 1 << 24  # an array of them takes 64 MiB at most, and a page of it memory once a key in it has a slot


class Slots(ABC):
    """Keys have slots from 0 on, in the order in which they came, but for those that got slots of keys that went."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def find(self, keys: Tensor) -> Tensor:
        """The slot of each of these keys, at least 0; -1 where it has none."""

    @property
    @abstractmethod
    def addresses(self) -> list[Address]:
        """Where its columns are."""

    @abstractmethod
    def add(self, keys: Tensor) -> Tensor:
        """Give these keys slots, the next ones in their order. They are all different, and have none yet."""

    @abstractmethod
    def remove(self, keys: Tensor, *, moved: Tensor, to: Tensor) -> None:
        """These keys go, and others are moved to these slots, so that the slots in use begin with 0 and have no gap."""


def are_few(num_keys: int) -> bool:
    """Whether the slots of keys below this one lie in an array."""
    return num_keys <= _FEW_KEYS


def slots_for(num_keys: int, storage: Storage | None = None, *, is_seen: bool = True) -> Slots:
    """
    Args:
        num_keys: keys are below it.
        is_seen: by other processes of this host, if they see any.

    Raises:
        UsageError: there is no room.
    """
    storage = storage or InMemory()
    if are_few(num_keys):
        return ListedSlots(num_keys, storage, is_seen=is_seen)
    return HashedSlots(storage, is_seen=is_seen)


@final
class ListedSlots(Slots):
    """Slots in an array with a place for each key that there can be: its slot plus 1, or 0 where it has none.

    See `slots_for`.
    """

    def __init__(self, num_keys: int, storage: Storage, *, is_seen: bool = True) -> None:
        self._num = 0
        self._places = storage.column(num_keys, 1, torch.int32, is_seen=is_seen)

    def __len__(self) -> int:
        return self._num

    def find(self, keys: Tensor) -> Tensor:
        return find_listed(keys, self._places.values)

    @property
    def addresses(self) -> list[Address]:
        return [self._places.address]

    def add(self, keys: Tensor) -> Tensor:
        slots = torch.arange(self._num, self._num + len(keys))
        self._places.values[keys, 0] = (slots + 1).int()
        self._num += len(keys)
        return slots

    def remove(self, keys: Tensor, *, moved: Tensor, to: Tensor) -> None:
        self._places.values[keys, 0] = 0
        self._places.values[moved, 0] = (to + 1).int()
        self._num -= len(keys)


@final
class HashedSlots(Slots):
    """Open addressing with linear probing (Knuth, "The Art of Computer Programming", volume 3, section 6.4), by
    buckets: a key lies in the first bucket with a free place from the one that its hash says. The place of one that is
    removed is free again once the index is made anew.

    See `slots_for`.
    """

    def __init__(self, storage: Storage, *, is_seen: bool = True) -> None:
        self._num = self._num_gone = 0
        self._storage, self._is_seen = storage, is_seen
        self._make_places(_LEAST_BUCKETS)

    def __len__(self) -> int:
        return self._num

    def find(self, keys: Tensor) -> Tensor:
        return find_hashed(keys, mixed(keys), *self._columns)

    @property
    def _columns(self) -> tuple[Tensor, Tensor]:
        """The keys, and the slots, of all buckets."""
        return self._keys.values[: self._num_buckets], self._slots.values[: self._num_buckets]

    @property
    def addresses(self) -> list[Address]:
        return [self._keys.address, self._slots.address]

    def add(self, keys: Tensor) -> Tensor:
        slots = torch.arange(self._num, self._num + len(keys))
        num = self._num + len(keys)
        if num + self._num_gone > _FULLEST * self._num_buckets * BUCKET_KEYS:
            before = self._keys, self._slots
            spare = min(self._num_gone, num // 4)  # so that it is not made anew soon again
            self._make_places(1 << math.ceil(math.log2((num + spare) / (_FULLEST * BUCKET_KEYS))))
            self._num_gone = 0
            for known, theirs in _taken(*before):
                self._place(known, theirs)
                self._storage.trim()
        self._place(keys, slots)
        self._num = num
        return slots

    def remove(self, keys: Tensor, *, moved: Tensor, to: Tensor) -> None:
        self._keys.values.view(-1)[self._places(keys)] = _GONE
        self._slots.values.view(-1)[self._places(moved)] = to
        self._num -= len(keys)
        self._num_gone += len(keys)

    def _places(self, keys: Tensor) -> Tensor:
        return find_hashed(keys, mixed(keys), self._columns[0], None)

    def _make_places(self, num_buckets: int) -> None:
        """Raises UsageError if there is no room, and then all stays as it was."""
        keys, slots = (
            self._storage.column(num_buckets, BUCKET_KEYS, torch.int64, is_seen=self._is_seen) for _ in range(2)
        )
        self._num_buckets, self._keys, self._slots = num_buckets, keys, slots

    def _place(self, keys: Tensor, slots: Tensor) -> None:
        buckets = self._first_buckets(keys)
        while len(keys):
            buckets, order = buckets.sort()
            keys, slots = keys[order], slots[order]
            num_taken = (self._keys.values.index_select(0, buckets) != _FREE).sum(dim=1)
            column = num_taken + torch.arange(len(keys)) - torch.searchsorted(buckets, buckets)
            fits = column < BUCKET_KEYS
            self._keys.values[buckets[fits], column[fits]] = ~keys[fits]
            self._slots.values[buckets[fits], column[fits]] = slots[fits]
            keys, slots, buckets = keys[~fits], slots[~fits], self._next_buckets(buckets[~fits])

    def _first_buckets(self, keys: Tensor) -> Tensor:
        """By the low bits; the high ones say which server has a key."""
        return mixed(keys) & (self._num_buckets - 1)

    def _next_buckets(self, buckets: Tensor) -> Tensor:
        return (buckets + 1) & (self._num_buckets - 1)


def find_listed(keys: Tensor, places: Tensor, begin: Any = None) -> Tensor:
    """As `ListedSlots.find`, in its column, or in several side by side.

    Args:
        begin: of each key, the place of key 0 in the column that it is in.
    """
    wanted = keys.numpy()
    found = places.numpy().reshape(-1).take(wanted if begin is None else wanted + begin).astype("i8")
    found -= 1
    return torch.from_numpy(found)


def find_hashed(
    keys: Tensor, hashed: Tensor, of_buckets: Tensor, slots_of_buckets: Tensor | None, begin: Any = 0, mask: Any = None
) -> Tensor:
    """As `HashedSlots.find`, in its columns, or in several side by side; without slots, the place of each key.

    NumPy's methods take a third of the time of torch's operations here, whose indices are few.

    Args:
        hashed: the keys, mixed.
        begin, mask: of each key, the first bucket of the columns that it is in, and their number less 1.
    """
    inside_of = of_buckets.numpy()
    slots_of = None if slots_of_buckets is None else slots_of_buckets.numpy().reshape(-1)
    slots = torch.full_like(keys, _NONE)
    found, wanted = slots.numpy(), ~keys.numpy()
    mask = len(of_buckets) - 1 if mask is None else mask
    buckets, left = (hashed.numpy() & mask) + begin, None
    while len(wanted):
        inside = inside_of.take(buckets, axis=0)
        (hits,) = (inside == wanted[:, None]).reshape(-1).nonzero()
        rows = hits >> _BUCKET_BITS
        places = (buckets.take(rows) << _BUCKET_BITS) + (hits & (BUCKET_KEYS - 1))
        found[rows if left is None else left[rows]] = places if slots_of is None else slots_of.take(places)
        goes_on = inside[:, -1] != _FREE  # the bucket is full
        goes_on[rows] = False
        (on,) = goes_on.nonzero()
        left = on if left is None else left[on]
        begin, mask = (each if isinstance(each, int) else each[on] for each in (begin, mask))
        wanted, buckets = wanted[on], ((buckets[on] - begin + 1) & mask) + begin
    return slots


def _taken(keys: Column, slots: Column) -> Iterator[tuple[Tensor, Tensor]]:
    """All keys with their slots, some at a time."""
    for some, theirs in zip(keys.values.split(_PIECE_BUCKETS), slots.values.split(_PIECE_BUCKETS), strict=True):
        is_taken = some < _FREE
        yield ~some[is_taken], theirs[is_taken]
