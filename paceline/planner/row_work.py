"""What a step reads and sends of tables' rows, as a few steps of a script show it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from paceline.comm.base import TableStore
from paceline.row_file import RowFile
from paceline.server.tables.changes import ChangedKeys, Changes
from paceline.server.tables.entries import KEY_BYTES
from paceline.server.tables.kept_rows import Keeping
from paceline.server.tables.shards import JOINING_PASSES
from paceline.server.tables.spec import RowGradients, TableSpec
from paceline.server.tables.table import Table

NUM_STEPS = 16
"""So many of a script with tables are looked at: how often keys come again decides what copies save."""


@final
@dataclass(frozen=True)
class RowWork:
    """Means of a step of one worker, of all tables together."""

    requests: float
    """For rows."""
    asked: tuple[tuple[float, float], ...]
    """Bytes of keys and of their rows, where a copy is used for 0, 1, ... further steps."""
    sent_bytes: float
    """Of gradients, with their keys."""
    updated_bytes: tuple[float, ...]
    """Read and written to update the rows of 1, 2, ... workers' batches at once."""
    is_read_ahead: bool = False
    """Rows of the next batch come while a step is computed, which plans do not price."""

    def asked_bytes(self, row_staleness: int) -> tuple[float, float]:
        return self.asked[min(row_staleness, len(self.asked) - 1)]

    def updated_bytes_of(self, num_batches: int) -> float:
        return of_batches(self.updated_bytes, num_batches) + joining_bytes(num_batches, self.sent_bytes)

    def of_part(self, part: float) -> "RowWork":
        """Of a batch that is this part of the one that was looked at. Rows grow with batches as from one to two."""
        factor = growth(self.updated_bytes, part)
        return replace(
            self,
            asked=tuple((keys * factor, rows * factor) for keys, rows in self.asked),
            sent_bytes=self.sent_bytes * factor,
            updated_bytes=tuple(each * factor for each in self.updated_bytes),
        )


@final
class WatchedTables(TableStore):
    """A worker's tables in its own process, which note the keys of each step."""

    def __init__(self) -> None:
        self._tables: list[Table] = []
        self._changed: list[ChangedKeys] = []
        self._requests: list[int] = []
        self._steps: list[dict[int, Tensor]] = []
        self._now: list[Mapping[int, Tensor]] = []
        self._is_read_ahead = False

    def open_tables(self, specs: Sequence[TableSpec], *, keeping: Keeping | None = None) -> TableStore:
        self._tables = [Table(spec) for spec in specs]
        self._changed = [ChangedKeys(table.all_keys) for table in self._tables]
        return self

    def read(self, wanted: Mapping[int, Tensor], *, is_fresh: bool) -> dict[int, Tensor]:
        if not is_fresh:
            self._now.append(wanted)
        return {table: self._tables[table].read(keys) for table, keys in wanted.items()}

    def read_ahead(self, wanted: Mapping[int, Tensor]) -> None:
        self._is_read_ahead = True

    def push(
        self,
        gradients: Sequence[RowGradients | None],
        *,
        weight: float,
        lrs: Sequence[float | None] = (),
        are_finite: bool = False,
    ) -> None:
        for table, changed, found in zip(self._tables, self._changed, gradients, strict=True):
            if found is not None:
                table.update(found)
                changed.add(found.keys)

    def changed(self, tables: Sequence[int], *, looks: bool = False) -> dict[int, Changes]:
        keys = {table: self._changed[table].take(0) for table in tables}
        return {table: Changes(own, self._tables[table].read(own)) for table, own in keys.items()}

    def end_step(self) -> None:
        now, self._now = self._now, []
        self._requests.append(len(now))
        self._steps.append(
            {
                table: torch.cat([wanted[table] for wanted in now if table in wanted]).unique()
                for table in sorted({table for wanted in now for table in wanted})
            }
        )

    def work(self) -> RowWork:
        steps, num = self._steps, len(self._steps)
        row_bytes = {number: each.spec.dim * each.spec.dtype.itemsize for number, each in enumerate(self._tables)}
        sent = {number: KEY_BYTES + each.spec.dim * each.spec.sent.itemsize for number, each in enumerate(self._tables)}
        touched = {number: each.update_bytes for number, each in enumerate(self._tables)}
        asked = []
        for staleness in range(max(1, num // 2)):
            whole = num // (staleness + 1) * (staleness + 1)  # a row that each step has is asked for once in so many
            found = self._asked(staleness)[:whole]
            asked.append((_mean(found, dict.fromkeys(touched, KEY_BYTES)), _mean(found, row_bytes)))
        return RowWork(
            requests=sum(self._requests) / num,
            asked=tuple(asked),
            sent_bytes=_mean(steps, sent),
            updated_bytes=together(steps, touched),
            is_read_ahead=self._is_read_ahead,
        )

    def _asked(self, staleness: int) -> list[dict[int, Tensor]]:
        """What each step asks for of what it reads."""
        asked: list[dict[int, Tensor]] = []
        for step in self._steps:
            kept = _joined(asked[max(0, len(asked) - staleness) :] if staleness else [])
            asked.append(
                {table: keys[~torch.isin(keys, kept[table])] if table in kept else keys for table, keys in step.items()}
            )
        return asked

    def state(self, table: int) -> dict[str, Tensor]:
        return self._tables[table].state()

    def counts(self, table: int) -> dict[str, int]:
        return self._tables[table].counts()

    def load(self, table: int, state: Mapping[str, Tensor]) -> None:
        self._tables[table].load(state)

    def save(self, table: int, directory: Path) -> list[RowFile]:
        return self._tables[table].save(directory)

    def load_files(self, table: int, directory: Path, files: Sequence[RowFile]) -> None:
        self._tables[table].load_files(directory, files)


def joining_bytes(num_batches: int, gradient_bytes: float) -> float:
    """Bytes that a server reads and writes to add up the gradients of so many batches."""
    return JOINING_PASSES * num_batches * gradient_bytes if num_batches > 1 else 0.0


def of_batches(known: Sequence[float], num_batches: int) -> float:
    """What so many batches have together, of which is known what 1, 2, ... have: of further ones as much is new as of
    the last one."""
    found = known[min(num_batches, len(known)) - 1]
    more = known[-1] - known[-2] if len(known) > 1 else found
    return found + max(0, num_batches - len(known)) * more


def growth(known: Sequence[float], part: float) -> float:
    """How many times as much a batch of this part of one has, where it grows as from one batch to two."""
    one, two = of_batches(known, 1), of_batches(known, 2)
    return part ** math.log2(two / one) if one else 1.0


def together(steps: Sequence[Mapping[int, Tensor]], bytes_of: Mapping[int, float]) -> tuple[float, ...]:
    """The different keys of 1, 2, ... steps in a row, each counted with so many bytes: means."""
    num = len(steps)
    return tuple(
        _mean([_joined(steps[start : start + count]) for start in range(num - count + 1)], bytes_of)
        for count in range(1, num + 1)
    )


def _joined(steps: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """The keys that some of these steps have."""
    tables = {table for step in steps for table in step}
    return {table: torch.cat([step[table] for step in steps if table in step]).unique() for table in tables}


def _mean(steps: Sequence[Mapping[int, Tensor]], bytes_of: Mapping[int, float]) -> float:
    return sum(len(keys) * bytes_of[table] for step in steps for table, keys in step.items()) / len(steps)
