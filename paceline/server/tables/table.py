"""A table, or a server's part of one: the rows that have been updated. All others are known by their keys."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.row_file import RowFile
from paceline.server.tables import row_files
from paceline.server.tables.reading import first_values, rows_of
from paceline.server.tables.row_optimizers import RowOptimizer
from paceline.server.tables.slots import Slots
from paceline.server.tables.spec import RowGradients, TableSpec, are_different
from paceline.server.tables.storage import Column, InMemory, Storage

_LEAST_ROWS = 64
_SAVED_BYTES = 1 << 24
_ROWS, _KEYS, _UPDATES, _SEED = "rows", "keys", "updates", "seed"


@final
class Table:
    """Rows lie in slots, in the order of their first update. No two keys share one."""

    def __init__(self, spec: TableSpec, storage: Storage | None = None) -> None:
        self.spec = spec
        self.num_updates = 0
        self._seed = spec.seed
        self._storage = storage or InMemory()
        self._piece = max(1, self._storage.piece_bytes // (spec.dim * spec.dtype.itemsize))
        self._slots = Slots(self._storage)
        self._keys, self._columns = self._empty(_LEAST_ROWS)

    def __len__(self) -> int:
        """How many rows take memory."""
        return len(self._slots)

    def read(self, keys: Tensor) -> Tensor:
        """A copy of these keys' rows, shape (keys, dim). A row that was never updated has its first values, and is not
        made. Raises UsageError for a key that is none of the table's."""
        keys = self.spec.checked(keys)
        if len(keys) > self._piece:
            return torch.cat([self.read(some) for some in keys.split(self._piece)])
        rows = rows_of(self.spec, self._columns[_ROWS].values, keys, self._slots.find(keys), seed=self._seed)
        self._storage.trim()
        return rows

    def plain_view(self) -> dict[str, Any]:
        """Where other processes of this host find what is read, as plain data."""
        return {"seed": self._seed, "columns": [*self._slots.addresses, self._columns[_ROWS].address]}

    @torch.no_grad()
    def update(self, gradients: RowGradients, optimizer: RowOptimizer | None = None) -> int:
        """One update, of these rows, which `require` has seen; returns how many bytes it has read and written.

        Args:
            optimizer: the table's with another learning rate, if it is to have one.
        """
        optimizer = optimizer or self.spec.optimizer
        self.num_updates += 1
        pieces = zip(gradients.keys.split(self._piece), gradients.values.split(self._piece), strict=True)
        return sum(self._update(keys, values, optimizer) for keys, values in pieces)

    def _update(self, keys: Tensor, gradients: Tensor, optimizer: RowOptimizer) -> int:
        slots = self._made(keys)
        part = {name: column.values.index_select(0, slots) for name, column in self._columns.items()}
        rows = part.pop(_ROWS)
        optimizer.step(rows, gradients, part, number=self.num_updates)
        with self._storage.changing():
            for name, changed in {_ROWS: rows, **part}.items():
                self._columns[name].values.numpy()[slots.numpy()] = changed.numpy()  # half of what index_copy_ takes
        self._storage.trim()
        return gradients.nbytes + 2 * (rows.nbytes + sum(state.nbytes for state in part.values()))

    def require(self, gradients: RowGradients) -> None:
        """Raises UsageError if `update` cannot take these: a key is none of the table's or comes twice, or a gradient
        is not finite."""
        spec, (keys, values) = self.spec, gradients
        spec.checked(keys)
        if values.shape != (len(keys), spec.dim) or values.dtype != spec.dtype:
            raise UsageError(
                f"table {spec.name!r}: gradients of {len(keys)} rows are {spec.dtype} of shape {len(keys), spec.dim}, "
                f"not {values.dtype} of shape {tuple(values.shape)}"
            )
        if not are_different(keys):
            raise UsageError(f"table {spec.name!r}: a key comes twice among {len(keys)}")
        culprit = spec.nonfinite(gradients)
        if culprit is not None:
            raise UsageError(f"table {spec.name!r}: the gradient of key {culprit} is not finite")

    def state(self) -> dict[str, Tensor]:
        """Everything that `load` takes, in the order of the keys, as copies."""
        keys, order = self._keys.values[: len(self), 0].sort()
        columns = {name: column.values[: len(keys)][order] for name, column in self._columns.items()}
        return {
            _KEYS: keys,
            **columns,
            _UPDATES: torch.tensor(self.num_updates),
            _SEED: torch.tensor(self._seed),
        }

    def save(self, directory: Path, *, number: int = 0, server: int = 0, num_servers: int = 1) -> list[RowFile]:
        """Write all rows to files there. Raises OSError. See `row_files.write`."""
        return row_files.write(self._pieces(), directory, number=number, server=server, num_servers=num_servers)

    def load_files(self, directory: Path, files: Iterable[RowFile], *, server: int = 0, num_servers: int = 1) -> None:
        """As `load`, with those rows of the files that are this server's. Raises UsageError also for a damaged file."""
        self._load(row_files.read(directory, files, server=server, num_servers=num_servers))

    def _pieces(self) -> Iterator[dict[str, Tensor]]:
        """The state, some rows at a time, at least once. Tensors are no copies."""
        columns = {name: column.values for name, column in self._columns.items()}
        step = max(1, _SAVED_BYTES // sum(values.shape[1] * values.itemsize for values in columns.values()))
        for start in range(0, max(1, len(self)), step):
            stop = min(start + step, len(self))
            yield {
                _KEYS: self._keys.values[start:stop, 0],
                **{name: values[start:stop] for name, values in columns.items()},
                _UPDATES: torch.tensor(self.num_updates),
                _SEED: torch.tensor(self._seed),
            }
            self._storage.trim()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there, with the rows of the state and no others. Raises UsageError, which names the table, if the
        state is of another one."""
        self._load([state])

    def _load(self, pieces: Iterable[Mapping[str, Tensor]]) -> None:
        other = Table(self.spec, self._storage)
        for piece in pieces:
            other._take(piece)
        self._keys, self._columns, self._slots = other._keys, other._columns, other._slots
        self.num_updates, self._seed = other.num_updates, other._seed

    def _take(self, state: Mapping[str, Tensor]) -> None:
        """Have the rows of the state besides those that are here."""
        spec = self.spec
        try:
            keys, updates, seed = spec.checked(state[_KEYS]), int(state[_UPDATES]), int(state[_SEED])
            for name, column in self._columns.items():
                if state[name].shape != (len(keys), column.values.shape[1]) or state[name].dtype != spec.dtype:
                    raise UsageError(f"its {name!r} are {state[name].dtype} of shape {tuple(state[name].shape)}")
            if len(keys.unique()) < len(keys) or bool((self._slots.find(keys) >= 0).any()):
                raise UsageError("a key comes twice")
            if unknown := state.keys() - self._columns.keys() - {_KEYS, _UPDATES, _SEED}:
                raise UsageError(f"it has {min(unknown)!r}, and the optimizer {spec.optimizer} none")
        except KeyError as error:
            raise UsageError(f"a state that is loaded into table {spec.name!r} has no {error}") from None
        except (UsageError, TypeError, RuntimeError) as error:
            raise UsageError(f"a state does not fit table {spec.name!r}: {error}") from None
        for column, values in ((self._keys, keys[:, None]), *((self._columns[n], state[n]) for n in self._columns)):
            column.reserve(len(self) + len(keys))
            column.values[len(self) : len(self) + len(keys)] = values
        for some in keys.split(self._piece):
            self._slots.add(some)
            self._storage.trim()
        self.num_updates, self._seed = updates, seed

    def _made(self, keys: Tensor) -> Tensor:
        """The slots of these keys, which all have one from here on."""
        slots = self._slots.find(keys)
        is_new = slots < 0
        if is_new.any():
            new = keys[is_new]
            values = first_values(self.spec, new, seed=self._seed)
            with self._storage.changing():
                for column in (self._keys, *self._columns.values()):
                    column.reserve(len(self) + len(new))
                slots[is_new] = made = self._slots.add(new)
                self._keys.values[made, 0] = new
                self._columns[_ROWS].values.index_copy_(0, made, values)
                for name, (_, value) in self.spec.optimizer.state.items():
                    self._columns[name].values.index_fill_(0, made, value)
        return slots

    def _empty(self, num_rows: int) -> tuple[Column, dict[str, Column]]:
        """For their keys, and by name for rows and what the optimizer keeps of them."""
        spec, new = self.spec, self._storage.column
        columns = {_ROWS: new(num_rows, spec.dim, spec.dtype, is_seen=True)}
        for name, (width, _) in spec.optimizer.state.items():
            columns[name] = new(num_rows, spec.dim if width == "element" else 1, spec.dtype)
        return new(num_rows, 1, torch.int64), columns
