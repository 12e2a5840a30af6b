"""A table, or a server's part of one: the rows that have been updated. All others are known by their keys."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.row_file import RowFile
from paceline.server.tables import row_files
from paceline.server.tables.dividing import WAITING
from paceline.server.tables.entries import KEY_BYTES, KEYS, Entries
from paceline.server.tables.reading import first_values, rows_of
from paceline.server.tables.row_optimizers import RowOptimizer
from paceline.server.tables.saved import Saved
from paceline.server.tables.spec import ROWS, RowGradients, TableSpec, Width, are_different
from paceline.server.tables.stepping import step
from paceline.server.tables.storage import InMemory, Storage

_SAVED_BYTES = 1 << 24
_LOOKS = 8
"""How often a table looks at all rows in the time that one may stay without an update. Where there are too many rows, a
part of them is looked at at a time."""
_LAST, _COUNT, _UPDATES, _SEED = "last", "count", "updates", "seed"
_ASKED, _EVICTED, _DROPPED = "asked", "evicted", "dropped"


@final
class Table:
    """No two keys share a row.

    Args:
        num_servers: that share the table, and the most rows that it may have.
        is_lent: workers on this host may make updates, too, where the storage lets them and rows only ever come.
    """

    def __init__(
        self, spec: TableSpec, storage: Storage | None = None, *, num_servers: int = 1, is_lent: bool = False
    ) -> None:
        self.spec = spec
        self.num_evicted = 0
        self.num_dropped = 0
        """Gradients, of keys that had no row yet."""
        self._seed, self._num_servers = spec.seed, num_servers
        self._storage = storage or InMemory()
        self.is_lent = is_lent and self._storage.lends and spec.min_count == 1 and not spec.evicts
        counts = self._storage if self.is_lent else InMemory()
        self._num_updates = counts.column(1, 1, torch.int64, is_seen=self.is_lent)
        self._piece = max(1, self._storage.piece_bytes // (spec.dim * spec.dtype.itemsize))
        self._groups = self._empty()
        self._saved: Saved | None = None
        self._changed: list[Tensor] | None = None
        """Keys whose entries have changed or gone, while somebody follows this table."""

    def __len__(self) -> int:
        """How many rows take memory."""
        return len(self._rows)

    @property
    def num_updates(self) -> int:
        """Updates so far, by whoever made them."""
        return int(self._num_updates.values)

    @num_updates.setter
    def num_updates(self, num: int) -> None:
        self._num_updates.values.fill_(num)

    @property
    def _rows(self) -> Entries:
        return self._groups[""]

    def read(self, keys: Tensor) -> Tensor:
        """A copy of these keys' rows, shape (keys, dim). A row that was never updated has its first values, and is not
        made. Raises UsageError for a key that is none of the table's."""
        keys = self.spec.checked(keys)
        if len(keys) > self._piece:
            return torch.cat([self.read(some) for some in keys.split(self._piece)])
        rows = rows_of(self.spec, self._rows.memory(ROWS), keys, self._rows.find(keys).numpy(), seed=self._seed)
        self._storage.trim()
        return rows

    def all_keys(self) -> Tensor:
        """A copy of the keys of all rows that take memory, in no order."""
        return self._rows.keys.clone()

    @property
    def update_bytes(self) -> int:
        """An update reads and writes so many bytes for each row."""
        return self.spec.dim * self.spec.computed.itemsize + 2 * (self._rows.entry_bytes - KEY_BYTES)

    def plain_view(self) -> dict[str, Any]:
        """Where other processes of this host find what is read, as plain data, and `counts`."""
        view = {"seed": self._seed, "counts": self.counts(), "is_lent": self.is_lent, **self._rows.plain_view()}
        return {**view, "num_updates": self._num_updates.address}

    def counts(self) -> dict[str, int]:
        """How many rows there are and keys that wait for one; rows that went and gradients that counted for nothing,
        since this process has the table."""
        num_waiting = sum(map(len, self._groups.values())) - len(self)
        return {"rows": len(self), "evicted": self.num_evicted, "waiting": num_waiting, "dropped": self.num_dropped}

    @torch.no_grad()
    def update(self, gradients: RowGradients, optimizer: RowOptimizer | None = None) -> int:
        """One update, of these rows, which `require` has seen; returns how many bytes it has read and written.

        Args:
            optimizer: the table's with another learning rate, if it is to have one.
        """
        optimizer = optimizer or self.spec.optimizer
        self.num_updates += 1
        self._follow(gradients.keys)
        pieces = zip(gradients.keys.split(self._piece), gradients.values.split(self._piece), strict=True)
        touched = sum(self._update(keys, values, optimizer) for keys, values in pieces)
        if self.spec.evicts:
            before = len(self)
            for entries in self._groups.values():
                self._evict(entries)
            self.num_evicted += before - len(self)
        return touched

    def _update(self, keys: Tensor, gradients: Tensor, optimizer: RowOptimizer) -> int:
        slots = self._rows.find(keys)
        if self.spec.min_count > 1:
            counts = self._counts_enough(keys, slots < 0)
            keys, gradients, slots = keys[counts], gradients[counts], slots[counts]
        is_new = slots < 0
        if is_new.any():
            slots[is_new] = self._rows.add(keys[is_new], self._first(keys[is_new]))
        entries = self._rows.at(slots)
        given = RowGradients(keys, gradients)
        step(self.spec, optimizer, entries, given, seed=self._seed, number=self.num_updates)
        if self.spec.evicts:
            entries[_LAST].fill_(self.num_updates)
        self._rows.put(slots, entries)
        self._note_changed(slots)
        self._storage.trim()
        return len(keys) * self.update_bytes

    def _counts_enough(self, keys: Tensor, has_none: Tensor) -> Tensor:
        """For each key, whether it has a row, or is to have one since as many updates had it. The others are
        counted."""
        new, waiting = keys[has_none], self._groups[WAITING]
        slots = waiting.find(new)
        is_first = slots < 0
        slots[is_first] = waiting.add(new[is_first], {_COUNT: 0})
        entries = waiting.at(slots)
        is_due = entries[_COUNT].add_(1)[:, 0] >= self.spec.min_count
        if self.spec.evicts:
            entries[_LAST].fill_(self.num_updates)
        waiting.put(slots, entries)
        waiting.drop(slots[is_due])
        self.num_dropped += int((~is_due).sum())
        counts = ~has_none
        counts[has_none] = is_due
        return counts

    def _first(self, keys: Tensor) -> dict[str, Tensor | float]:
        states = self.spec.optimizer.state.items()
        return {ROWS: first_values(self.spec, keys, seed=self._seed), **{name: value for name, (_, value) in states}}

    def _evict(self, entries: Entries) -> None:
        """Forget what was not updated for long, and what was longest not if there is too much."""
        after, most = self.spec.evict_after, self.spec.max_rows
        if after and self.num_updates % max(1, after // _LOOKS) == 0:
            self._drop(entries, (entries.column(_LAST)[:, 0] <= self.num_updates - after).nonzero()[:, 0])
        if most and len(entries) > (most := -(-most // self._num_servers)):
            by_key = entries.keys.argsort()  # so that a tie is broken alike wherever rows lie
            oldest = by_key[entries.column(_LAST)[by_key, 0].argsort(stable=True)]
            self._drop(entries, oldest[: len(entries) - (most - most // _LOOKS)])

    def _drop(self, entries: Entries, slots: Tensor) -> None:
        self._follow(entries.keys[slots])
        entries.drop(slots)

    def follow(self, *, on: bool = True) -> None:
        """Have it noted from here on which keys change, or no longer."""
        self._changed = [] if on else None

    def _follow(self, keys: Tensor) -> None:
        if self._changed is not None:
            self._changed.append(keys)

    def take_changed(self) -> Tensor:
        """The keys that have changed, or gone, since it was asked last, each once."""
        changed, self._changed = self._changed or [], []
        unique: Tensor = torch.cat([torch.empty(0, dtype=torch.int64), *changed]).unique()
        return unique

    def groups(self) -> list[tuple[str, int]]:
        """What some keys have in common, and how many these are: for `some_keys`."""
        return [(prefix, len(entries)) for prefix, entries in self._groups.items()]

    def some_keys(self, group: str, stop: int, *, num_bytes: int) -> tuple[Tensor, int]:
        """A copy of the keys of a group in slots before this one, as far as there are any, with entries of about so
        many bytes; and the first of these slots."""
        entries = self._groups[group]
        stop = min(stop, len(entries))
        begin = max(0, stop - max(1, num_bytes // entries.entry_bytes))
        return entries.keys[begin:stop].clone(), begin

    def states(self, keys: Tensor) -> dict[str, Tensor]:
        """What there is of these keys, each of which comes once, and how far the table is: for `take_states`, as
        copies."""
        state = {_ASKED: keys, _EVICTED: torch.tensor(self.num_evicted), _DROPPED: torch.tensor(self.num_dropped)}
        groups = {}
        for prefix, entries in self._groups.items():
            slots = entries.find(keys)
            groups[prefix] = self._copies(entries, slots[slots >= 0])
        return {**state, **self._with_numbers(groups)}

    def take_states(self, state: Mapping[str, Tensor]) -> None:
        """Have of these keys what another copy of this table has. Raises KeyError, and UsageError where there is no
        room."""
        asked = state[_ASKED]
        for prefix, entries in self._groups.items():
            given = {name: state[prefix + name] for name in (KEYS, *entries.widths)}
            gone = entries.find(asked[~torch.isin(asked, given[KEYS])])
            entries.drop(gone[gone >= 0])
            for start in range(0, len(given[KEYS]), self._piece):
                some = {name: values[start : start + self._piece] for name, values in given.items()}
                keys, slots = some[KEYS], entries.find(some.pop(KEYS))
                is_new = slots < 0
                entries.put(slots[~is_new], {name: values[~is_new] for name, values in some.items()})
                entries.add(keys[is_new], {name: values[is_new] for name, values in some.items()})
                self._storage.trim()
        self.num_updates, self._seed = int(state[_UPDATES]), int(state[_SEED])
        self.num_evicted, self.num_dropped = int(state[_EVICTED]), int(state[_DROPPED])
        self._saved = None

    def require(self, gradients: RowGradients) -> None:
        """Raises UsageError if `update` cannot take these: a key is none of the table's or comes twice, or a gradient
        is not finite."""
        spec, (keys, values) = self.spec, gradients
        spec.checked(keys)
        shape = len(keys), spec.dim
        if values.shape != shape or values.dtype != spec.computed:
            raise UsageError(
                f"table {spec.name!r}: gradients of {len(keys)} rows are {spec.computed} of shape {shape}, "
                f"not {values.dtype} of shape {tuple(values.shape)}"
            )
        if not are_different(keys):
            raise UsageError(f"table {spec.name!r}: a key comes twice among {len(keys)}")
        culprit = spec.nonfinite(gradients)
        if culprit is not None:
            raise UsageError(f"table {spec.name!r}: the gradient of key {culprit} is not finite")

    def state(self) -> dict[str, Tensor]:
        """Everything that `load` takes, in the order of the keys, as copies."""
        return self._with_numbers({prefix: entries.in_order() for prefix, entries in self._groups.items()})

    def save(self, directory: Path, *, number: int = 0, server: int = 0, num_servers: int = 1) -> list[RowFile]:
        """Have files there with all rows. Those that earlier ones have as they are now are not written again, unless
        rows may go from this table. Raises OSError, and ValueError as `row_files.make_directory`."""
        row_files.make_directory(directory)
        writer = row_files.Writer(number, server, num_servers)
        before, num_later, pieces = self._kept_in(directory, writer)
        files = row_files.write(pieces, directory, writer, before=before)
        self._note_saved(directory, files, num_later=num_later)
        return files

    def _kept_in(
        self, directory: Path, writer: row_files.Writer
    ) -> tuple[Sequence[RowFile], int, Iterator[dict[str, Tensor]]]:
        """Files there of what was saved before; how many rows of it are others by now; and what is to be written."""
        saved = self._saved
        if saved is not None and all(map(writer.may_have_written, saved.files)) and saved.pays(len(self)):
            files = row_files.name_again(saved.files, saved.directory, directory)
            if files:
                return files, saved.num_later, self._changed_pieces(saved)
        return (), 0, self._pieces()

    def _note_saved(self, directory: Path, files: Sequence[RowFile], *, num_later: int) -> None:
        """These files there have all rows of this table, unless rows may go. Without room for which of them change, the
        next ones have all rows again."""
        self._saved = None
        if len(self._groups) == 1 and not self.spec.evicts and not self.is_lent:
            with suppress(UsageError):
                self._saved = Saved(self._storage, directory, files, num_rows=len(self), num_later=num_later)

    def _note_changed(self, slots: Tensor) -> None:
        """As `_note_saved`."""
        try:
            if self._saved is not None:
                self._saved.note(slots)
        except UsageError:
            self._saved = None

    def load_files(self, directory: Path, files: Sequence[RowFile], *, server: int = 0, num_servers: int = 1) -> None:
        """As `load`, with those rows of the files that are this server's. Raises UsageError also for a damaged file."""
        num_later = self._load(row_files.read(directory, files, server=server, num_servers=num_servers))
        if all(file.num_servers == num_servers for file in files):
            own = [file for file in files if file.server == server]
            self._note_saved(directory, own, num_later=num_later)

    def _pieces(self) -> Iterator[dict[str, Tensor]]:
        """The state, some rows at a time, at least once. Tensors are no copies."""
        step = max(1, _SAVED_BYTES // self._rows.entry_bytes)
        for start in range(0, max(1, *map(len, self._groups.values())), step):
            yield self._with_numbers(
                {prefix: entries.some(start, start + step) for prefix, entries in self._groups.items()}
            )
            self._storage.trim()

    def _changed_pieces(self, saved: Saved) -> Iterator[dict[str, Tensor]]:
        """The rows that have changed, as `_pieces` gives all; tensors are copies."""
        for slots in saved.changed(max(1, _SAVED_BYTES // self._rows.entry_bytes)):
            yield self._with_numbers({"": self._copies(self._rows, slots)})

    def _copies(self, entries: Entries, slots: Tensor) -> dict[str, Tensor]:
        """Keys and columns in these slots."""
        parts = []
        for some in slots.split(self._piece):
            parts.append({KEYS: entries.keys.index_select(0, some), **entries.at(some)})
            self._storage.trim()
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _with_numbers(self, groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        state = {prefix + name: tensor for prefix, group in groups.items() for name, tensor in group.items()}
        return {**state, _UPDATES: torch.tensor(self.num_updates), _SEED: torch.tensor(self._seed)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there, with the rows of the state and no others. Raises UsageError, which names the table, if the
        state is of another one."""
        self._load([(0, state)])

    def _load(self, pieces: Iterable[tuple[int, Mapping[str, Tensor]]]) -> int:
        """See `row_files.read`; returns how many rows have come that are not the first of their keys."""
        other, latest, num_later = Table(self.spec, self._storage, is_lent=self.is_lent), 0, 0
        for later, piece in pieces:
            latest = max(latest, later)
            num_later += len(piece[KEYS]) if later else 0
            other._take(piece, is_older=later < latest)
        self._groups, self.num_updates, self._seed = other._groups, other.num_updates, other._seed
        self._saved = None
        return num_later

    def _take(self, state: Mapping[str, Tensor], *, is_older: bool) -> None:
        """Have the rows of the state besides those that are here, which may be newer ones of the same keys."""
        spec, groups = self.spec, self._groups
        known = {prefix + name for prefix, entries in groups.items() for name in (KEYS, *entries.widths)}
        try:
            updates, seed = int(state[_UPDATES]), int(state[_SEED])
            for prefix, entries in groups.items():
                keys = spec.checked(state[prefix + KEYS])
                for name, (width, dtype) in entries.widths.items():
                    values = state[prefix + name]
                    if values.shape != (len(keys), width) or values.dtype != dtype:
                        raise UsageError(f"its {prefix + name!r} are {values.dtype} of shape {tuple(values.shape)}")
                if len(keys.unique()) < len(keys) or (not is_older and bool((entries.find(keys) >= 0).any())):
                    raise UsageError("a key comes twice")
            if unknown := state.keys() - known - {_UPDATES, _SEED}:
                raise UsageError(f"it has {min(unknown)!r}, and a table of this one's settings none")
        except KeyError as error:
            raise UsageError(f"a state that is loaded into table {spec.name!r} has no {error}") from None
        except (UsageError, TypeError, RuntimeError) as error:
            raise UsageError(f"a state does not fit table {spec.name!r}: {error}") from None
        for prefix, entries in groups.items():
            whole = {name: state[prefix + name] for name in (KEYS, *entries.widths)}
            if is_older:
                is_new = entries.find(whole[KEYS].long()) < 0
                whole = {name: values[is_new] for name, values in whole.items()}
            for start in range(0, len(whole[KEYS]), self._piece):
                some = {name: values[start : start + self._piece] for name, values in whole.items()}
                entries.add(some.pop(KEYS).long(), some)
                self._storage.trim()
        self.num_updates, self._seed = max(self.num_updates, updates), seed

    def _empty(self) -> dict[str, Entries]:
        """By the beginning of names in a state: rows, with what is kept of them, and keys that wait for one."""
        spec, storage = self.spec, self._storage
        last = {_LAST: Width(1, torch.int64)} if spec.evicts else {}
        seen = spec.columns if self.is_lent else (ROWS,)
        groups = {"": Entries(storage, {**spec.columns, **last}, num_keys=spec.num_rows, seen=seen)}
        if spec.min_count > 1:
            groups[WAITING] = Entries(storage, {_COUNT: Width(1, torch.int64), **last}, num_keys=spec.num_rows)
        return groups
