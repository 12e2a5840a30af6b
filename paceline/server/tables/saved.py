"""What a table has last written to files, and which of its rows have changed since."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from paceline.row_file import RowFile
from paceline.server.tables.storage import Storage

_MOST_LATER = 16
"""How often changed rows are written alone, before all are written again: whoever reads the files opens them all."""
_LOOKED_AT = 1 << 20


@final
class Saved:
    """Rows keep their slots meanwhile.

    Args:
        files: in this directory, with all rows of the table.
        num_rows: of the table, for which room is made at once.
        num_later: rows in those that are not the first of their keys.

    Raises:
        UsageError: there is no room for what has changed.
    """

    def __init__(
        self, storage: Storage, directory: Path, files: Sequence[RowFile], *, num_rows: int, num_later: int
    ) -> None:
        self.directory, self.files = directory, files
        self._num_later = num_later
        self._has_changed = storage.column(max(1, num_rows), 1, torch.uint8)

    def note(self, slots: Tensor) -> None:
        """These rows have changed. Raises UsageError as above."""
        if len(slots):
            self._has_changed.reserve(int(slots.max()) + 1)
            self._has_changed.values[slots, 0] = 1

    @property
    def num_later(self) -> int:
        """How many rows later files would have, once those that have changed are written."""
        return self._num_later + int(self._has_changed.values.count_nonzero())

    def pays(self, num_rows: int) -> bool:
        """Whether changed rows are to be written alone: files then take at most half as much again as all rows."""
        return (
            2 * self.num_later <= num_rows
            and max((file.later for file in self.files), default=_MOST_LATER) < _MOST_LATER
        )

    def changed(self, most: int) -> Iterator[Tensor]:
        """The slots of changed rows, so many at a time, at least once."""
        left = torch.empty(0, dtype=torch.int64)
        for start, some in enumerate(self._has_changed.values[:, 0].split(_LOOKED_AT)):
            *whole, left = torch.cat([left, some.nonzero()[:, 0] + start * _LOOKED_AT]).split(most)
            yield from whole
        yield left
