"""Which rows have changed since a worker last asked, if it has all others or those of its next batch: what it lacks."""

from collections.abc import Callable
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


_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Given(NamedTuple):
    """What a worker was given."""

    keys: Tensor
    """int64 of shape (rows,), none twice."""
    rows: Tensor
    """As they were then, shape (rows, dim)."""

    def changed(self, read: Callable[[Tensor], Tensor]) -> "Replaced":
        """What is another row now, whoever has changed it, or had it go.

        Args:
            read: gives the rows of keys, as they are.
        """
        now, words = read(self.keys), _WORDS[self.rows.dtype.itemsize]
        (places,) = (now.view(words) != self.rows.view(words)).any(dim=1).nonzero(as_tuple=True)
        return Replaced(places.int(), now[places])


class Replaced(NamedTuple):
    places: Tensor
    """Where rows differ from what was given: places among these, int32 of shape (rows,)."""
    rows: Tensor
    """The rows at these places, as they are now, shape (rows, dim)."""


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
    """Notes what each worker lacks of one table, which has the keys that `all_keys` gives."""

    def __init__(self, all_keys: Callable[[], Tensor]) -> None:
        self._all_keys = all_keys
        self._lacking: dict[int, _Lacking] = {}
        self._left: set[int] = set()

    @property
    def is_followed(self) -> bool:
        """Whether a worker asks for what has changed."""
        return bool(self._lacking or self._left)

    def add(self, keys: Tensor) -> None:
        """These rows, none of which comes twice, have been updated."""
        for lacking in self._lacking.values():
            lacking.add(keys)

    def look(self, worker: int) -> Tensor:
        """What `take` would give, which the worker goes on to lack. It has taken some, and has not left."""
        return self._lacking[worker].once()

    def take(self, worker: int) -> Tensor:
        """Those since the worker asked last, in order; all, if it has left since. At the first time, from which on they
        are noted, none has changed."""
        lacking = self._lacking.get(worker, _Lacking())
        self._lacking[worker] = _Lacking()
        if worker in self._left:
            self._left.remove(worker)
            lacking.add(self._all_keys())
        return lacking.once()

    def leave(self, worker: int) -> None:
        """The worker has trained, and may never ask again: nothing is noted for it."""
        if self._lacking.pop(worker, None) is not None:
            self._left.add(worker)

    def forget(self) -> None:
        """Workers have all rows as they are."""
        self._lacking = {worker: _Lacking() for worker in self._lacking}
