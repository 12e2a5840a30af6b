"""Rows by key: what a server holds of a store, and a worker of what it has sent."""

from typing import final

import torch
from torch import Tensor

from paceline.kv.spec import Pairs


@final
class Rows:
    """Sorted keys and a row of `width` numbers for each. A key that was never written reads as 0 and takes no
    memory."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.keys = torch.empty(0, dtype=torch.int64)
        self._rows = torch.empty(0, width, dtype=dtype)

    def read(self, keys: Tensor) -> Tensor:
        """A copy, shape (keys, width)."""
        places, is_there = self._find(keys)
        rows = self._rows.new_zeros(len(keys), self._rows.shape[1])
        rows[is_there] = self._rows[places[is_there]]
        return rows

    def write(self, keys: Tensor, rows: Tensor) -> None:
        """Replace these keys' rows; keys ascend, none twice."""
        places, is_there = self._find(keys)
        if not is_there.all():
            merged = torch.cat([self.keys, keys[~is_there]])
            order = merged.argsort()
            self.keys = merged[order]
            blank = self._rows.new_zeros(len(merged) - len(self._rows), self._rows.shape[1])
            self._rows = torch.cat([self._rows, blank])[order]
            places = torch.searchsorted(self.keys, keys)
        self._rows[places] = rows

    def missing(self, keys: Tensor) -> Tensor:
        """For each key, whether it was never written."""
        return ~self._find(keys)[1]

    def between(self, start: int, stop: int) -> Pairs:
        """What is there of the keys `start` to `stop`; rows are a view."""
        first, last = torch.searchsorted(self.keys, torch.tensor([start, stop])).tolist()
        return Pairs(self.keys[first:last], self._rows[first:last])

    def _find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """For each key its place, and whether it is there."""
        places = torch.searchsorted(self.keys, keys)
        if not len(self.keys):
            return places, torch.zeros(len(keys), dtype=torch.bool)
        return places, self.keys[places.clamp(max=len(self.keys) - 1)] == keys


def united(some: list[Pairs]) -> Pairs:
    """All keys of some pairs, at least one, with the sum of their values."""
    if len(some) == 1:
        return some[0]
    keys, places = torch.cat([each.keys for each in some]).unique(return_inverse=True)
    values = torch.cat([each.values for each in some])
    return Pairs(keys, values.new_zeros(len(keys), values.shape[1]).index_add_(0, places, values))
