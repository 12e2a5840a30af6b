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

from paceline.server.tables.row_optimizers import with_lr
from paceline.server.tables.spec import RowGradients, TableSpec


@final
@dataclass(frozen=True)
class Keeping:
    """How long a copy may be used."""

    steps: int
    """Of this worker, after the one that it was read for."""
    staleness: float = math.inf
    """Of the admission rule."""

    def last_clocks(self, complete: Tensor, *, clock: int) -> Tensor:
        """For each row that is read at this clock, the last one at which its copy may be used.

        Args:
            complete: for each row, the clock before which it has all updates.
        """
        last = torch.full_like(complete, clock + self.steps)
        return last if self.staleness == math.inf else last.minimum(complete + int(self.staleness))


class Found(NamedTuple):
    is_kept: Tensor
    """Of each key, whether there is a copy that may be used."""
    rows: Tensor
    """These copies, in the order of the keys that have one."""


@final
class KeptRows:
    """Of one table. Those that may be used no longer are dropped whenever others come, so that there are never more
    than were read at the last `steps` + 1 clocks."""

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self.drop()

    def __len__(self) -> int:
        return len(self._keys)

    def drop(self) -> None:
        self._keys = torch.empty(0, dtype=torch.int64)  # in order
        self._rows, self._last = self._spec.empty_rows(), self._keys

    def find(self, keys: Tensor, *, clock: int) -> Found:
        """What may be used of these keys, none of which comes twice, at this clock."""
        places, is_here = self._places(keys)
        is_kept = is_here & (self._last[places] >= clock) if len(self) else is_here
        return Found(is_kept, self._rows[places[is_kept]])

    def keep(self, keys: Tensor, rows: Tensor, last: Tensor, *, clock: int) -> None:
        """Have copies of these rows, which have just been read, and drop what may be used no longer.

        Args:
            last: of each row, see `Keeping.last_clocks`.
        """
        stays = self._last >= clock
        stays &= ~torch.isin(self._keys, keys)
        self._keys, order = torch.cat([self._keys[stays], keys]).sort()
        self._rows = torch.cat([self._rows[stays], rows])[order]
        self._last = torch.cat([self._last[stays], last])[order]

    @torch.no_grad()
    def update(self, gradients: RowGradients, *, lr: float | None = None) -> None:
        """The worker has pushed these. Its copies have them at once where the row and its gradient say all that the
        server goes by; else once they are read anew."""
        if self._spec.optimizer.state or self._spec.min_count > 1 or not len(self):
            return
        places, is_here = self._places(gradients.keys)
        own = self._rows[places[is_here]].to(self._spec.computed)
        with_lr(self._spec.optimizer, lr).step(own, gradients.values[is_here], {}, number=1)
        self._rows[places[is_here]] = own.to(self._spec.dtype)

    def _places(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Where each key is, and whether it is there at all."""
        if not len(self):
            return torch.zeros_like(keys), torch.zeros(len(keys), dtype=torch.bool)
        places = torch.searchsorted(self._keys, keys).clamp_(max=len(self) - 1)
        return places, self._keys[places] == keys
