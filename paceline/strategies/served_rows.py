"""The rows of a model's tables and weights while servers hold them, seen from one worker."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from paceline.comm.base import TableStore
from paceline.errors import UsageError
from paceline.hooks import place_in_script
from paceline.nn.sharded_embedding import ShardedEmbedding
from paceline.row_file import RowFile
from paceline.server.tables.kept_rows import Keeping
from paceline.server.tables.spec import TableSpec
from paceline.strategies.base import Context
from paceline.strategies.served_weights import ServedWeight

ROW_STALENESS_DOC = "steps after which a worker asks a server again for a row that it has (default 0: at each)"


def require_row_staleness(row_staleness: int, *, staleness: float | None, rule: str) -> None:
    """Raises UsageError, which names the option, for a value that is out of range or has no effect.

    Args:
        staleness: of the admission rule; none: workers make each update together.
        rule: by its name.
    """
    if row_staleness < 0:
        raise UsageError(f"row_staleness must be at least 0, not {row_staleness}")
    if row_staleness and staleness is None:
        raise UsageError(f"row_staleness has no effect under {rule}, where a row is as the last update has left it")
    if staleness is not None and row_staleness > staleness:
        raise UsageError(f"row_staleness={row_staleness} is above the staleness of {rule}, which is {staleness:g}")


def keeping_for(row_staleness: int, *, staleness: float | None) -> Keeping | None:
    """What the option asks for; none: rows are asked for each time."""
    return Keeping(row_staleness, staleness) if row_staleness and staleness is not None else None


class OpensTables(Protocol):
    def open_tables(self, specs: Sequence[TableSpec], *, keeping: Keeping | None = None) -> TableStore:
        """See `Store.open_tables`."""


@final
class ServedRows:
    """Has the servers hold the tables' rows, those that they have already among them. Collective call.

    Args:
        keeping: see `Store.open_tables`.
        weights: whose rows they are to hold, too.
    """

    def __init__(
        self,
        context: Context,
        store: OpensTables,
        tables: Sequence[ShardedEmbedding],
        *,
        keeping: Keeping | None,
        weights: Sequence[ServedWeight] = (),
    ) -> None:
        self._all: tuple[ShardedEmbedding | ServedWeight, ...] = (*tables, *weights)
        self._log = context.log if keeping is not None else None
        self._weights = dict(enumerate(weights, len(tables)))
        self._store = store.open_tables([each.spec for each in self._all], keeping=keeping) if self._all else None
        self._together = _Together()
        self._has_warned = False
        for number, table in enumerate(tables):
            assert self._store is not None
            rows = table.rows()
            table.move_to(_Elsewhere(self._store, number, self._together))
            table.load_rows(rows)
        for number, weight in self._weights.items():
            assert self._store is not None
            weight.move_to(_Elsewhere(self._store, number, self._together))
        self.refresh()

    def push(self, *, weight: float, is_void: bool, are_finite: bool) -> None:
        """Give the servers what backward passes have found, for the update that the next push of the model is for; if
        `is_void`, drop it. `are_finite`: it has been looked at (`ShardedEmbedding.find_nonfinite`)."""
        self._warn_of(self._together.end_step())
        gradients = [each.take_gradients() for each in self._all]
        if self._store is not None and not is_void:
            lrs = [each.changed_lr for each in self._all]
            self._store.push(gradients, weight=weight, lrs=lrs, are_finite=are_finite)

    def _warn_of(self, in_vain: Iterable[int]) -> None:
        """Tell, once, that the script's words on what to read ahead of these tables were wrong."""
        names = " and ".join(repr(self._all[number].spec.name) for number in in_vain)
        if names and not self._has_warned:
            self._has_warned = True
            place_in_script().warn(
                f"read_ahead was given keys of table {names} that no look-up of their batch has had, in this order, so "
                "that their rows come in vain; give it the keys of one look-up, as the model has them"
            )

    def refresh(self, *, looks: bool = False) -> None:
        """Have weights be what the servers have; if the worker only `looks`, until they are put back."""
        if self._store is not None and self._weights:
            for number, changes in self._store.changed(list(self._weights), looks=looks).items():
                self._weights[number].take(changes)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Weights are afterwards what they are now."""
        before = {number: weight.kept() for number, weight in self._weights.items()}
        try:
            yield
        finally:
            for number, weight in self._weights.items():
                weight.put_back(before[number])

    def leave(self) -> None:
        """The worker has trained."""
        if self._store is not None and self._log is not None:
            self._log({"rows_read": self._store.num_read, "rows_kept": self._store.num_kept})


@final
class _Together:
    """What the tables of a worker read in one request, and ahead."""

    def __init__(self) -> None:
        self.expected: dict[int, Tensor] = {}
        """By table, the keys of rows that are read next."""
        self.announced: dict[int, Tensor] = {}
        """The keys of the next batch."""
        # Keys and rows that came with another table's, by table and whether they had to be fresh.
        self._brought: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
        self._ahead: dict[int, Tensor] = {}  # by table, keys whose rows are under way, until one of them is looked up
        self._is_ahead_of_step = False  # these are for batches after the present step's
        self._were_read: set[int] = set()  # tables, since any was announced

    def announce(self, table: int, keys: Tensor) -> None:
        self.announced[table] = keys
        self._were_read.clear()

    def forget_announced(self) -> None:
        """The next batch is another one than was announced. What is under way for it is dropped."""
        self.announced.clear()
        self._ahead = {}

    def read(self, store: TableStore, table: int, keys: Tensor, *, is_fresh: bool) -> Tensor:
        brought = self._brought.get((table, is_fresh))
        if brought is not None and torch.equal(brought[0], keys):
            del self._brought[table, is_fresh]
            return brought[1]
        wanted = {**self.expected, table: keys}
        self.expected.clear()
        if not is_fresh and self._are_ahead(wanted):
            wanted, self._ahead = self._ahead, {}
        found = store.read(wanted, is_fresh=is_fresh)
        self._brought.update({(each, is_fresh): (wanted[each], rows) for each, rows in found.items() if each != table})
        if not is_fresh:
            self._were_read |= found.keys()
            self._read_ahead(store)
        return found[table]

    def _are_ahead(self, wanted: Mapping[int, Tensor]) -> bool:
        """Whether these rows are under way: a table may also be looked up with other keys before."""
        return all(each in self._ahead and torch.equal(self._ahead[each], keys) for each, keys in wanted.items())

    def _read_ahead(self, store: TableStore) -> None:
        """The next batch's rows, once nothing that this one needs comes behind them."""
        if self.announced and not self._ahead and self.announced.keys() <= self._were_read:
            self._ahead, self.announced, self._is_ahead_of_step = self.announced, {}, True
            store.read_ahead(self._ahead)

    def end_step(self) -> list[int]:
        """Forget what was for the batches of this step; of which tables rows were read ahead for it in vain."""
        in_vain = [] if self._is_ahead_of_step else list(self._ahead)
        if in_vain:
            self._ahead = {}
        self._is_ahead_of_step = False
        self._brought.clear()
        self.announced.clear()
        return in_vain


@final
class _Elsewhere:
    """A table's home on the servers."""

    def __init__(self, store: TableStore, number: int, together: _Together) -> None:
        self._store, self._number, self._together = store, number, together

    def expect(self, keys: Tensor) -> None:
        self._together.expected[self._number] = keys

    def expect_next(self, keys: Tensor) -> None:
        self._together.announce(self._number, keys)

    def expect_others(self) -> None:
        self._together.forget_announced()

    def look(self, keys: Tensor) -> Tensor | None:
        return self._store.look(self._number, keys)

    def read(self, keys: Tensor, *, is_fresh: bool) -> Tensor:
        # The virtual engine counts the script's operations. Those of requests are none, nor those of other workers.
        with _disable_current_modes() if is_in_torch_dispatch_mode() else nullcontext():
            return self._together.read(self._store, self._number, keys, is_fresh=is_fresh)

    def __deepcopy__(self, memo: object) -> "_Elsewhere":
        """A copy of the model looks at the same rows."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError("the servers hold the rows, which are no part of the model; save what table.rows() gives")

    def state(self) -> dict[str, Tensor]:
        return self._store.state(self._number)

    def counts(self) -> dict[str, int]:
        return self._store.counts(self._number)

    def save(self, directory: Path) -> list[RowFile]:
        return self._store.save(self._number, directory)

    def load_files(self, directory: Path, files: Sequence[RowFile]) -> None:
        self._store.load_files(self._number, directory, files)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._store.load(self._number, state)
