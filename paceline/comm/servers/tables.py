"""A worker's way to the rows of a run's tables, whose servers it asks as `ServerGroup` does."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.comm.base import Collective, TableStore, Timing
from paceline.comm.servers.carrier import Carrier
from paceline.comm.servers.rows_in_view import Found, RowsSeen
from paceline.errors import PeerLost, UsageError
from paceline.messages import HEAD_BYTES
from paceline.row_file import RowFile
from paceline.server.actions import Send
from paceline.server.client_core import ClientCore
from paceline.server.spec import Reply
from paceline.server.tables.changes import Changes
from paceline.server.tables.client_core import TableClient
from paceline.server.tables.hashing import owners
from paceline.server.tables.kept_rows import Keeping, KeptRows
from paceline.server.tables.row_optimizers import RowOptimizer, with_lr
from paceline.server.tables.spec import RowGradients, TableSpec


class _Own(NamedTuple):
    """An update that this worker makes itself."""

    found: Found
    values: Tensor
    """The rows' gradients."""
    optimizer: RowOptimizer


_MOST_LOST = 3
"""Failures in a row to map servers' rows, after which a worker asks for rows by message from then on."""


@final
class ServedTables(TableStore):
    """
    Args:
        timing: of the store, which what this takes is added to.
        store: of the same servers, whose next exchange may take gradients of rows along.
        keeping: rows that were asked for are used again, for so long; none: never.
        joins: it comes later than others, to servers that have the tables' rows.
    """

    def __init__(
        self,
        carrier: Carrier,
        specs: Sequence[TableSpec],
        *,
        collective: Collective,
        timing: Timing,
        epoch: int,
        store: ClientCore,
        keeping: Keeping | None,
        joins: bool = False,
    ) -> None:
        self._keeping, self._store = keeping, store
        self._kept = [KeptRows(spec) for spec in specs]
        self._carrier, self._collective, self._timing = carrier, collective, timing
        self._specs, self._sees_rows = specs, carrier.is_all_beside
        self._num_lost = 0  # how often in a row servers' rows could not be mapped
        self._seen: RowsSeen | None = None
        self._own: dict[int, _Own] = {}  # by table
        new_client = partial(TableClient, specs, rank=store.rank, epoch=epoch, num_servers=len(carrier.beside))
        self._client, self._ahead = new_client(), new_client()
        self._wanted_ahead: Mapping[int, Tensor] | None = None
        self._is_ahead: Mapping[int, Tensor] = {}  # of each table's: which were read ahead
        self._present: dict[int, Tensor] = {}  # by table, the keys of what this worker is training on
        # To read from a server on this host takes no network.
        self._asks_ahead = torch.tensor([not is_beside and carrier.reads_ahead for is_beside in carrier.beside])
        self._joins = joins
        self._from_first(self._client.open)

    def look(self, table: int, keys: Tensor) -> Tensor | None:
        began_s, seen = time.perf_counter(), self._rows_in_view()
        rows = None if seen is None else seen.look(table, keys)
        if rows is not None:
            self.num_read += len(keys)
            self._timing.moved_bytes += keys.nbytes + rows.nbytes  # messages would have each key once
            self._timing.communication_s += time.perf_counter() - began_s
        return rows

    def read(self, wanted: Mapping[int, Tensor], *, is_fresh: bool) -> dict[int, Tensor]:
        self.num_read += sum(map(len, wanted.values()))
        began_s, rows, left = time.perf_counter(), {}, {}
        for table, keys in wanted.items():
            in_view = self._rows_in_view()
            seen = None if in_view is None else in_view.read(table, keys)
            if seen is None or self._seen is None:
                left[table] = keys
                continue
            rows[table] = seen
            # Counts the bytes that messages would have moved.
            self._timing.moved_bytes += 2 * HEAD_BYTES * self._seen.num_read + keys.nbytes + seen.nbytes
        if rows:
            self._timing.communication_s += time.perf_counter() - began_s
        if not is_fresh:
            self._present.update(wanted)
        keeping = None if is_fresh else self._keeping
        if not left:
            return rows
        return rows | (self._asked(left) if keeping is None else self._read_or_keep(left, keeping))

    def read_ahead(self, wanted: Mapping[int, Tensor]) -> None:
        if not self._asks_ahead.any():
            return
        self._end_reading_ahead()
        if self._keeping is not None:
            clock = self._store.clock + 1
            wanted = {table: keys[~self._kept[table].find(keys, clock=clock).is_kept] for table, keys in wanted.items()}
        self._wanted_ahead = wanted
        self._is_ahead = {table: self._comes_ahead(table, keys) for table, keys in wanted.items()}
        ahead = {table: keys[self._is_ahead[table]] for table, keys in wanted.items()}
        self._carrier.set_off(self._ahead, self._ahead.read_ahead(ahead))

    def _comes_ahead(self, table: int, keys: Tensor) -> Tensor:
        """Which of these to read ahead: not those that this worker's own step is about to change."""
        is_elsewhere = self._asks_ahead[owners(keys, len(self._asks_ahead))]
        return is_elsewhere & ~torch.isin(keys, self._present[table]) if table in self._present else is_elsewhere

    def _end_reading_ahead(self) -> Mapping[int, Tensor] | None:
        """What was read ahead, all of which is here now."""
        wanted, self._wanted_ahead = self._wanted_ahead, None
        if wanted is not None:
            self._timed((), self._ahead)
        return wanted

    def _asked(self, wanted: Mapping[int, Tensor]) -> dict[int, Tensor]:
        is_ahead = _are_equal(wanted, self._wanted_ahead) and self._end_reading_ahead() is not None
        if is_ahead:
            sends = self._client.read(wanted, ahead=self._ahead, is_ahead=self._is_ahead)
        else:
            sends = self._client.read(wanted)
        if sends:  # there is a key
            self._timed(sends)
        return self._client.rows()

    def _read_or_keep(self, wanted: Mapping[int, Tensor], keeping: Keeping) -> dict[int, Tensor]:
        """Ask for those rows alone of which there is no copy that may be used still."""
        clock = self._store.clock
        found = {table: self._kept[table].find(keys, clock=clock) for table, keys in wanted.items()}
        missing = {table: keys[~found[table].is_kept] for table, keys in wanted.items()}
        rows = self._asked(missing)
        for table, (is_kept, kept) in found.items():
            last = keeping.last_clocks(self._client.complete(table), clock=clock)
            self._kept[table].keep(missing[table], rows[table], last, clock=clock)
            self.num_kept += len(kept)
            whole = kept.new_empty(len(is_kept), kept.shape[1])
            whole[is_kept], whole[~is_kept] = kept, rows[table]
            rows[table] = whole
        return rows

    def _rows_in_view(self) -> RowsSeen | None:
        """The rows where they lie; none: the servers are to be asked."""
        if not self._sees_rows:
            return None
        if self._seen is None or self._seen.is_outdated:
            self._map()
        return self._seen

    def _map(self) -> None:
        """Have what servers show of their rows in this process's memory."""
        self._seen = None  # its memory goes before there is more
        self._ask(self._client.show())
        shown = self._client.shown()
        self._sees_rows = all("board" in each for each in shown)
        if not self._sees_rows:
            return
        try:
            self._seen = RowsSeen(self._specs, shown)
            self._num_lost = 0
        except (PeerLost, OSError):  # another update has made new columns meanwhile, or this process may map no more
            self._num_lost += 1
            self._sees_rows = self._num_lost < _MOST_LOST

    def push(
        self,
        gradients: Sequence[RowGradients | None],
        *,
        weight: float,
        lrs: Sequence[float | None] = (),
        are_finite: bool = False,
    ) -> None:
        lrs = lrs or [None] * len(gradients)
        if self._keeping is not None:
            for kept, given, lr in zip(self._kept, gradients, lrs, strict=True):
                if given is not None:
                    kept.update(given, lr=lr)
        self._own = {
            number: own
            for number, (given, lr) in enumerate(zip(gradients, lrs, strict=True))
            if given is not None and (own := self._own_update(number, given, lr, are_finite=are_finite)) is not None
        }
        gradients = [None if number in self._own else given for number, given in enumerate(gradients)]
        if self._own and all(given is None for given in gradients):
            return
        if self._carrier.takes_rows_along and self._store.rows_come_along:
            self._store.take_along(self._client.parts(gradients, weight=weight, lrs=lrs))
        else:
            self._timed(self._client.push(gradients, weight=weight, lrs=lrs, clock=self._store.clock))

    def _own_update(self, table: int, gradients: RowGradients, lr: float | None, *, are_finite: bool) -> _Own | None:
        """What this worker is to do itself; none: it is for the servers, and so is a gradient that is not finite."""
        spec, found = self._specs[table], None if self._seen is None else self._seen.find(table, gradients.keys)
        if found is None or not (are_finite or spec.nonfinite(gradients) is None):
            return None
        return _Own(found, gradients.values.to(spec.sent).to(spec.computed), with_lr(spec.optimizer, lr))

    def settle(self, reply: Reply) -> None:
        """The exchange that `push` was for has been answered. This worker makes its own updates: of the rows of those
        servers that have taken its push.

        Raises:
            PeerLost: it can map the rows no longer.
        """
        began_s, (own, self._own) = time.perf_counter(), (self._own, {})
        servers = [server for server, staleness in enumerate(reply.staleness) if staleness >= 0]
        for table, (found, values, optimizer) in own.items():
            while servers and not (self._seen and self._seen.update(table, found, values, optimizer, servers)):
                self._map()
                if not self._sees_rows:
                    raise PeerLost(f"rows of table {self._specs[table].name!r} can be updated no longer")
            num_bytes = found.keys.nbytes + values.numel() * self._specs[table].sent.itemsize
            self._timing.moved_bytes += num_bytes  # as messages would have
        if own:
            self._timing.communication_s += time.perf_counter() - began_s

    def changed(self, tables: Sequence[int], *, looks: bool = False) -> dict[int, Changes]:
        self._timed(self._client.changed(tables, looks=looks))
        return self._client.changes()

    def state(self, table: int) -> dict[str, Tensor]:
        self._ask(self._client.get_state(table))
        return self._client.state()

    def counts(self, table: int) -> dict[str, int]:
        self._ask(self._client.show())
        return self._client.counts(table)

    def load(self, table: int, state: Mapping[str, Tensor]) -> None:
        self._require_loadable(table)
        self._kept[table].drop()
        self._from_first(partial(self._client.set_state, table, state))

    def save(self, table: int, directory: Path) -> list[RowFile]:
        self._ask(self._client.save(table, directory))
        return self._client.saved()

    def load_files(self, table: int, directory: Path, files: Sequence[RowFile]) -> None:
        self._require_loadable(table)
        self._kept[table].drop()
        self._from_first(partial(self._client.load, table, directory, files))

    def _require_loadable(self, table: int) -> None:
        """Raises UsageError where others train on this table's rows, and this worker with them."""
        if self._joins and self._store.clock:
            raise UsageError(
                f"rank {self._store.rank} loads the rows of table {self._specs[table].name!r} while others train on "
                "them; with --elastic load rows before the first batch"
            )

    def _from_first(self, request: Callable[[], Iterable[Send]]) -> None:
        """Rank 0 asks, and nobody goes on before it is answered. Who joins asks nothing: servers have been asked."""
        if self._collective.rank == 0 and not self._joins:
            self._ask(request())
        self._collective.barrier()

    def _timed(self, sends: Iterable[Send], client: TableClient | None = None) -> None:
        client = client or self._client
        self._timing.communication_s += self._ask(sends, client)
        self._timing.moved_bytes += client.moved_bytes

    def _ask(self, sends: Iterable[Send], client: TableClient | None = None) -> float:
        """Ask, and wait; the seconds that took."""
        client = client or self._client
        elapsed_s = self._carrier.carry(client, sends)
        client.require_done()
        return elapsed_s


def _are_equal(wanted: Mapping[int, Tensor], other: Mapping[int, Tensor] | None) -> bool:
    """Whether these are the same keys of the same tables, in the same order."""
    if other is None or wanted.keys() != other.keys():
        return False
    return all(torch.equal(keys, other[table]) for table, keys in wanted.items())
