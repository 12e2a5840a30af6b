"""Where a table's rows lie: a hash table from keys to slots, all keys of a batch at once."""

import math
from typing import final

import torch
from torch import Tensor

from paceline.server.tables.hashing import mixed

_WIDTH = 8  # keys of a bucket: a cache line
_LEAST_BUCKETS = 64
_FULLEST = 0.4  # of all places; then 1 bucket in 60 is full (Poisson), and a key may lie in the one after it
_NONE = -1


@final
class Slots:
    """Keys have slots from 0 on, in the order in which they came.

    Open addressing with linear probing (Knuth, "The Art of Computer Programming", volume 3, section 6.4), by buckets:
    a key lies in the first bucket with a free place from the one that its hash says.
    """

    def __init__(self) -> None:
        self._num = 0
        self._keys, self._slots = _places(_LEAST_BUCKETS)

    def __len__(self) -> int:
        return self._num

    def find(self, keys: Tensor) -> Tensor:
        """The slot of each of these keys, at least 0; -1 where it has none."""
        slots = torch.full_like(keys, _NONE)
        left, buckets = torch.arange(len(keys)), self._first_buckets(keys)
        while len(left):
            inside = self._keys.index_select(0, buckets)
            row, column = (inside == keys.unsqueeze(1)).nonzero(as_tuple=True)
            slots[left[row]] = self._slots.view(-1).index_select(0, buckets[row] * _WIDTH + column)
            goes_on = inside[:, -1] != _NONE  # the bucket is full
            goes_on[row] = False
            left, keys = left[goes_on], keys[goes_on]
            buckets = self._next_buckets(buckets[goes_on])
        return slots

    def add(self, keys: Tensor) -> Tensor:
        """Give these keys slots, the next ones in their order. They are all different, and have none yet."""
        slots = torch.arange(self._num, self._num + len(keys))
        self._num += len(keys)
        if self._num > _FULLEST * self._keys.numel():
            known, theirs = self._all()
            self._keys, self._slots = _places(math.ceil(2 * self._num / _FULLEST))
            self._place(known, theirs)
        self._place(keys, slots)
        return slots

    def keys(self) -> Tensor:
        """All of them, in the order of their slots."""
        keys, slots = self._all()
        return keys[slots.argsort()]

    def _all(self) -> tuple[Tensor, Tensor]:
        is_taken = self._keys != _NONE
        return self._keys[is_taken], self._slots[is_taken]

    def _place(self, keys: Tensor, slots: Tensor) -> None:
        buckets = self._first_buckets(keys)
        while len(keys):
            buckets, order = buckets.sort()
            keys, slots = keys[order], slots[order]
            num_taken = (self._keys.index_select(0, buckets) != _NONE).sum(dim=1)
            column = num_taken + torch.arange(len(keys)) - torch.searchsorted(buckets, buckets)
            fits = column < _WIDTH
            self._keys[buckets[fits], column[fits]] = keys[fits]
            self._slots[buckets[fits], column[fits]] = slots[fits]
            keys, slots, buckets = keys[~fits], slots[~fits], self._next_buckets(buckets[~fits])

    def _first_buckets(self, keys: Tensor) -> Tensor:
        """By the low bits; the high ones say which server has a key."""
        return mixed(keys) & (len(self._keys) - 1)

    def _next_buckets(self, buckets: Tensor) -> Tensor:
        return (buckets + 1) & (len(self._keys) - 1)


def _places(least_keys: int) -> tuple[Tensor, Tensor]:
    """Of keys and their slots, shape (buckets, _WIDTH), where the buckets are a power of two."""
    num_buckets = max(_LEAST_BUCKETS, 1 << (-(-least_keys // _WIDTH) - 1).bit_length())
    keys = torch.full((num_buckets, _WIDTH), _NONE)
    return keys, keys.clone()
