"""The rows of a model's tables while servers hold them, seen from one worker."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor

from paceline.comm.base import Store, TableStore
from paceline.errors import UsageError
from paceline.nn.sharded_embedding import ShardedEmbedding
from paceline.row_file import RowFile


@final
class ServedRows:
    """Has the servers hold the tables' rows, those that they have already among them. Collective call."""

    def __init__(self, store: Store, tables: Sequence[ShardedEmbedding]) -> None:
        self._tables = tables
        self._store = store.open_tables([table.spec for table in tables]) if tables else None
        for number, table in enumerate(tables):
            assert self._store is not None
            rows = table.rows()
            table.move_to(_Elsewhere(self._store, number))
            table.load_rows(rows)

    def push(self, *, weight: float, is_void: bool) -> None:
        """Give the servers what backward passes have found, for the update that the next push of the model is for; or
        drop it, if that is to be none."""
        gradients = [table.take_gradients() for table in self._tables]
        if self._store is not None and not is_void:
            self._store.push(gradients, weight=weight)


@final
class _Elsewhere:
    """A table's home on the servers."""

    def __init__(self, store: TableStore, number: int) -> None:
        self._store, self._number = store, number

    def read(self, keys: Tensor) -> Tensor:
        return self._store.read(self._number, keys)

    def __deepcopy__(self, memo: object) -> "_Elsewhere":
        """A copy of the model looks at the same rows."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError("the servers hold the rows, which are no part of the model; save what table.rows() gives")

    def state(self) -> dict[str, Tensor]:
        return self._store.state(self._number)

    def save(self, directory: Path) -> list[RowFile]:
        return self._store.save(self._number, directory)

    def load_files(self, directory: Path, files: Sequence[RowFile]) -> None:
        self._store.load_files(self._number, directory, files)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._store.load(self._number, state)
