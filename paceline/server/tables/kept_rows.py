"""Copies of rows that a worker has read, and uses again while they are recent enough.

Sans-IO. A row that a worker reads at its clock c has every update of the clocks before `complete`, which the server
says. Under SSP a worker at clock c' needs every update of the clocks before c' - staleness. So the copy may be used up
to clock complete + staleness, whoever made the updates (Ho et al., NIPS 2013, section 3, where a row of a worker's
cache has such a clock, too).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.server.tables.entries import Entries
from paceline.server.tables.row_optimizers import with_lr
from paceline.server.tables.spec import ROWS, RowGradients, TableSpec, Width
from paceline.server.tables.storage import InMemory


@final
@dataclass(frozen=True)
class Keeping:
    """How long a copy may be used."""

    steps: int
    """For how many steps of this worker, after the one that it was read for."""
    staleness: float = math.inf
    """The admission rule's bound on staleness."""

    def last_clocks(self, complete: Tensor, *, clock: int) -> Tensor:
        """For each row that is read at this clock, the last one at which its copy may be used.

        Args:
            complete: for each row, the clock before which it has all updates.
        """
        last = torch.full_like(complete, clock + self.steps)
        return last if self.staleness == math.inf else last.minimum(complete + int(self.staleness))


class Found(NamedTuple):
    is_kept: Tensor
    """For each key, whether there is a copy that may be used."""
    rows: Tensor
    """These copies, in the order of the keys that have one."""


_LAST = "last"  # clock at which a copy may be used


@final
class KeptRows:
    """The rows of one table that a worker keeps. Those that may be used no longer are dropped whenever others come, so
    that there are never more than were read at the last `steps` + 1 clocks."""

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self.drop()

    def __len__(self) -> int:
        return len(self._entries)

    def drop(self) -> None:
        widths = {ROWS: self._spec.columns[ROWS], _LAST: Width(1, torch.int64)}
        self._entries = Entries(InMemory(), widths, num_keys=self._spec.num_rows)

    def find(self, keys: Tensor, *, clock: int) -> Found:
        """What may be used of these keys, none of which comes twice, at this clock."""
        slots = self._entries.find(keys)
        is_kept = slots >= 0
        slots, last = slots[is_kept], self._entries.column(_LAST)[:, 0]
        is_recent = last[slots] >= clock
        is_kept[is_kept.clone()] = is_recent
        return Found(is_kept, self._entries.at(slots[is_recent], (ROWS,))[ROWS])

    def keep(self, keys: Tensor, rows: Tensor, last: Tensor, *, clock: int) -> None:
        """Have copies of these rows, which have just been read, and drop what may be used no longer.

        Args:
            last: of each row, see `Keeping.last_clocks`.
        """
        self._entries.drop((self._entries.column(_LAST)[:, 0] < clock).nonzero()[:, 0])
        slots, new = self._entries.find(keys), {ROWS: rows, _LAST: last.unsqueeze(1)}
        is_here = slots >= 0
        if is_here.any():
            self._entries.put(slots[is_here], {name: values[is_here] for name, values in new.items()})
            keys, new = keys[~is_here], {name: values[~is_here] for name, values in new.items()}
        self._entries.add(keys, new)

    @torch.no_grad()
    def update(self, gradients: RowGradients, *, lr: float | None = None) -> None:
        """The worker has pushed these. Its copies have them at once where the row and its gradient say all that the
        server goes by; else once they are read anew."""
        if self._spec.optimizer.state or self._spec.min_count > 1 or not len(self):
            return
        slots = self._entries.find(gradients.keys)
        is_here = slots >= 0
        own = self._entries.at(slots[is_here], (ROWS,))[ROWS].to(self._spec.computed)
        with_lr(self._spec.optimizer, lr).step(own, gradients.values[is_here], {}, number=1)
        self._entries.put(slots[is_here], {ROWS: own.to(self._spec.dtype)})
