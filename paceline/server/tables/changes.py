"""Which rows have changed since a worker last asked: what it lacks, if it has all others."""

from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

_FEW = 1 << 16


class Changes(NamedTuple):
    keys: Tensor
    """int64 of shape (rows,), none twice."""
    rows: Tensor
    """As they are now, shape (rows, dim)."""


@dataclass
class _Lacking:
    """What one worker lacks."""

    known: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Once each."""
    new: list[Tensor] = field(default_factory=list)
    num_new: int = 0

    def add(self, keys: Tensor) -> None:
        self.new.append(keys)
        self.num_new += len(keys)
        if self.num_new > max(_FEW, len(self.known)):  # so that each is looked at a few times, and there are not many
            self.known = self.once()
            self.new, self.num_new = [], 0

    def once(self) -> Tensor:
        unique: Tensor = torch.cat([self.known, *self.new]).unique()
        return unique


@final
class ChangedKeys:
    """Of one table."""

    def __init__(self) -> None:
        self._lacking: dict[int, _Lacking] = {}

    def add(self, keys: Tensor) -> None:
        """These rows, none of which comes twice, have been updated."""
        for lacking in self._lacking.values():
            lacking.add(keys)

    def take(self, worker: int) -> Tensor:
        """Those since the worker asked last, in order. From the first time on they are noted: none has changed then."""
        lacking = self._lacking.get(worker)
        self._lacking[worker] = _Lacking()
        return _Lacking().known if lacking is None else lacking.once()

    def forget(self) -> None:
        """Workers have all rows as they are."""
        self._lacking = {worker: _Lacking() for worker in self._lacking}
