"""A server's part of a run's tables: what workers ask of it, and the updates that come with those of the model.

Sans-IO, and a part of `ServerCore`. A worker pushes the gradients of rows ahead of the model's. They wait here until
the server's shard makes an update of what that worker pushed, and become a part of it: under bsp one update of all
workers' rows, under ssp and asp one of each worker's. What a later push finds still waiting was for no update, or
another copy of the tables has made it.

Where several servers outlive workers, all of them, and all copies, have a push's gradients of rows before one of them
has any of the push itself (`ClientCore.rows_come_along`). So wherever that counts, they do: nobody asks for them when a
worker dies.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.messages import Kind, Message, WireError, cut_for, from_frames, raw_bytes, to_frames
from paceline.row_file import RowFile
from paceline.server.closing import Applied
from paceline.server.state import pack, unpack
from paceline.server.tables.changes import ChangedKeys, Given
from paceline.server.tables.giving import Giving
from paceline.server.tables.row_optimizers import RowOptimizer, with_lr
from paceline.server.tables.spec import RowGradients, TableSpec, summed
from paceline.server.tables.storage import InFiles, InMemory, Storage, TableFiles
from paceline.server.tables.table import Table

Fields = Mapping[str, Any]
"""The fields of an answer."""


class _Waiting(NamedTuple):
    """What came with one push."""

    clock: int
    """The worker's clock; an update joins pushes of equal clocks."""
    weight: float
    gradients: list[RowGradients | None]
    """The gradients for each table; none: the worker has not used it."""
    optimizers: list[RowOptimizer]
    """The optimizer of each table, with the learning rate that the worker says."""


JOINING_PASSES = 3
"""Each of several gradients of a row is read, and their sum read and written."""


class RowUpdate(NamedTuple):
    """An update of a table's rows. It leaves equal copies of the table equal."""

    table: int
    gradients: RowGradients
    """The joined gradients of all workers."""
    optimizer: RowOptimizer


@final
class TableShards:
    """
    Args:
        new_memory: makes what the tables lie in, if not in files.
    """

    def __init__(self, new_memory: Callable[[], Storage] = InMemory) -> None:
        self.files: TableFiles | None = None
        """Where the tables are to lie; none: in memory."""
        self.joins = True
        """An update may be of several workers' pushes."""
        self.agrees_on_rates = True
        """Workers who make an update have the same learning rates: all have been there from the start."""
        self.may_lend = False
        """Each push is an update of its own, for whose rows nobody waits."""
        self.before_updating: Callable[[Sequence[RowUpdate]], None] | None = None
        """Called with all tables' updates that go with one of the model, before anything is changed."""
        self._new_memory = new_memory
        self._storage: Storage = InMemory()
        self._tables: list[Table] = []
        self._opened: Mapping[str, Any] = {}  # as it was asked for
        self._changed: list[ChangedKeys] = []  # by table
        self._waiting: dict[int, _Waiting] = {}  # by worker
        self._given: dict[int, dict[int, Given]] = {}  # by worker and table: what was read ahead last
        self.handlers = {
            Kind.OPEN_TABLES: self._open,
            Kind.READ_ROWS: self._read,
            Kind.READ_AHEAD: self._read_ahead,
            Kind.SHOW_ROWS: self._show,
            Kind.CHANGED_ROWS: self._changes,
            Kind.PUSH_ROWS: self._push,
            Kind.GET_ROWS: self._get,
            Kind.SET_ROWS: self._set,
            Kind.SAVE_ROWS: self._save,
            Kind.LOAD_ROWS: self._load,
        }

    @property
    def are_open(self) -> bool:
        return bool(self._tables)

    @property
    def has_waiting(self) -> bool:
        """Whether gradients of rows wait for the update that they belong to."""
        return bool(self._waiting)

    def receive(self, message: Message) -> Fields:
        """What is answered. Raises WireError, which names the table and the key where it is one's fault."""
        try:
            with self._storage.alone():
                return self.handlers[message.kind](message)
        except (UsageError, KeyError, TypeError, ValueError) as error:
            raise WireError(f"refused {message.kind.name}: {error}") from None

    def update(self, applied: Iterable[Applied]) -> int:
        """The shard has made updates of these; returns how many bytes the rows' own have read and written."""
        touched = 0
        if self._tables and self._waiting:
            by_update: dict[int, list[_Waiting]] = defaultdict(list)
            for one in applied:
                if one.worker in self._waiting and self._waiting[one.worker].clock == one.clock:
                    by_update[one.iteration].append(self._waiting.pop(one.worker))
            for waiting in by_update.values():
                updates = list(self._joined(waiting))
                if updates and self.before_updating is not None:
                    self.before_updating(updates)
                touched += self.repeat(updates)
                if len(waiting) > 1:
                    touched += JOINING_PASSES * sum(map(_gradient_bytes, waiting))
        return touched

    def repeat(self, updates: Iterable[RowUpdate]) -> int:
        """Make these updates, as another copy of these tables may have, of one of the model; returns how many bytes
        they have read and written."""
        touched = 0
        with self._storage.alone():
            for table, joined, optimizer in updates:
                touched += self._at(table).update(joined, optimizer)
                self._changed[table].add(joined.keys)
        return touched

    def copied(self, update: RowUpdate) -> tuple[dict[str, Any], list[Tensor]]:
        """What another copy of these tables is told of the update, for `read_update`: plain data, and tensors."""
        table, (keys, values), optimizer = update
        return {"table": table, "count": len(keys), "lr": optimizer.lr}, [keys, values]

    def read_update(self, told: Mapping[str, Any]) -> RowUpdate:
        """What `copied` gives, with memory for the tensors. Raises ValueError and KeyError."""
        spec, count = self._at(told["table"]).spec, told["count"]
        gradients = RowGradients(torch.empty(count, dtype=torch.int64), spec.empty_rows(count, spec.computed))
        return RowUpdate(told["table"], gradients, with_lr(spec.optimizer, told["lr"]))

    def asked_for(self) -> Iterator[Message]:
        """What another copy is to be asked, so that it has these tables, without rows, and all that waits."""
        if self._tables:
            yield Message(Kind.OPEN_TABLES, 0, body=self._opened)
        for worker, waiting in self._waiting.items():
            given = [None if each is None else len(each.keys) for each in waiting.gradients]
            body = {"weight": waiting.weight, "counts": given, "lrs": [each.lr for each in waiting.optimizers]}
            pairs = zip(self._tables, waiting.gradients, strict=True)
            sent = [(each.keys, each.values.to(table.spec.sent)) for table, each in pairs if each is not None]
            payload = to_frames([tensor for pair in sent for tensor in pair])
            yield Message(Kind.PUSH_ROWS, 0, sender=worker, clock=waiting.clock, body=body, payload=payload)

    def give(self) -> Giving:
        """Begin to give another copy all rows."""
        return Giving(self._tables)

    def take_states(self, states: Mapping[str, Tensor]) -> None:
        """What `Giving` gives. Raises KeyError, and UsageError where there is no room."""
        for number, table in enumerate(self._tables):
            start = f"{number}."
            own = {name.removeprefix(start): each for name, each in states.items() if name.startswith(start)}
            table.take_states(own)

    def leave(self, worker: int) -> None:
        """It has trained."""
        self._given.pop(worker, None)
        for changed in self._changed:
            changed.leave(worker)

    def let_go(self, worker: int, *, clock: int | None) -> None:
        """It is gone, and this is the clock of its last push that counts, if any does."""
        if worker in self._waiting and self._waiting[worker].clock != clock:
            del self._waiting[worker]

    def close(self) -> None:
        """Let go of all memory."""
        self._tables.clear()
        self._waiting.clear()
        self._given.clear()

    def _joined(self, contributions: Sequence[_Waiting]) -> Iterator[RowUpdate]:
        """Those who have not used a table count with gradients of 0, as they do where rows are parameters. The learning
        rate is that of the first who has, the one of the lowest rank."""
        for index, table in enumerate(self._tables):
            if any(each.gradients[index] is not None for each in contributions):
                nothing = RowGradients(torch.empty(0, dtype=torch.int64), table.spec.empty_rows(0, table.spec.computed))
                some = [each.gradients[index] or nothing for each in contributions]
                optimizer = next(each.optimizers[index] for each in contributions if each.gradients[index] is not None)
                yield RowUpdate(index, summed(some, [each.weight for each in contributions]), optimizer)

    def _require_one_rate(self, sender: int, given: _Waiting) -> None:
        """Raises ValueError where others have given another learning rate for the same update, of which nothing is made
        yet."""
        others = [each for worker, each in self._waiting.items() if worker != sender and each.clock == given.clock]
        for index, table in enumerate(self._tables if self.joins and self.agrees_on_rates else ()):
            users = [each for each in (given, *others) if each.gradients[index] is not None]
            rates = sorted({each.optimizers[index].lr for each in users})
            if len(rates) > 1 and given in users:
                raise ValueError(
                    f"workers give table {table.spec.name!r} learning rates from {rates[0]:g} to {rates[-1]:g} for "
                    "one update; set its lr to the same on all"
                )

    # --- requests -----------------------------------------------------------------------------------------------

    def _open(self, message: Message) -> Fields:
        self._storage = self._new_memory() if self.files is None else InFiles(self.files)
        specs, num = [TableSpec.of_plain(plain) for plain in message.body["tables"]], message.body["num_servers"]
        if type(num) is not int or num < 1:
            raise ValueError(f"{num!r} servers")
        self._tables = [Table(spec, self._storage, num_servers=num, is_lent=self.may_lend) for spec in specs]
        self._changed = [ChangedKeys(table.all_keys) for table in self._tables]
        self._opened = message.body
        return {}

    def _show(self, message: Message) -> Fields:
        """Where workers on this host see the rows, and how many there are."""
        if not self._tables:
            raise ValueError("there are no tables")
        views = [table.plain_view() for table in self._tables]
        for view, changed in zip(views, self._changed, strict=True):
            view["is_lent"] &= not changed.is_followed
        return {"body": {**self._storage.plain_view(), "tables": views}}

    def _read(self, message: Message) -> Fields:
        """The rows that are asked for. Of rows that the worker has read ahead, those that have changed since."""
        rows = [each.rows for each in self._asked(message).values()]
        since = message.body.get("since", ())
        given = self._given.pop(message.sender) if since else {}
        replaced = [given[table].changed(self._at(table).read) for table in since]
        tensors = [*rows, *(tensor for each in replaced for tensor in each)]
        body = {"changed": [len(each.places) for each in replaced]} if since else {}
        return {"body": body, "payload": to_frames(tensors), "tensor_bytes": sum(each.nbytes for each in tensors)}

    def _read_ahead(self, message: Message) -> Fields:
        """Rows that the worker needs for its next batch, when it asks which of them have changed."""
        given = self._given[message.sender] = self._asked(message)
        rows = [each.rows for each in given.values()]
        return {"payload": to_frames(rows), "tensor_bytes": sum(each.nbytes for each in rows)}

    def _asked(self, message: Message) -> dict[int, Given]:
        """By table, the keys that the worker names, and their rows."""
        tables = [self._at(index) for index in message.body["tables"]]
        keys = [torch.empty(_count(count, message), dtype=torch.int64) for count in message.body["counts"]]
        if len(tables) != len(keys):
            raise ValueError(f"keys of {len(keys)} tables for {len(tables)}")
        from_frames(cut_for(message.payload, keys), keys)  # a copy: the worker can change its memory
        rows = [table.read(own) for table, own in zip(tables, keys, strict=True)]
        return dict(zip(message.body["tables"], map(Given, keys, rows), strict=True))

    def _changes(self, message: Message) -> Fields:
        """Rows that have changed since the worker asked last, and their keys."""
        tables = [self._at(index) for index in message.body["tables"]]
        changed = [self._changed[index] for index in message.body["tables"]]
        looks = bool(message.body.get("looks"))
        keys = [each.look(message.sender) if looks else each.take(message.sender) for each in changed]
        tensors = [each for table, own in zip(tables, keys, strict=True) for each in (own, table.read(own))]
        size = sum(each.nbytes for each in tensors)
        return {"body": {"counts": list(map(len, keys))}, "payload": to_frames(tensors), "tensor_bytes": size}

    def receive_push(self, message: Message) -> None:
        """Gradients of rows that come with the push that they belong to. Raises WireError as `receive`."""
        self.receive(replace(message, kind=Kind.PUSH_ROWS, body=message.body["rows"]))

    def _push(self, message: Message) -> Fields:
        weight, counts = message.body["weight"], message.body["counts"]
        if type(weight) not in (int, float) or not 0 < weight < math.inf or len(counts) != len(self._tables):
            raise ValueError(f"rows of {len(counts)} tables with weight {weight!r}; there are {len(self._tables)}")
        rates = message.body.get("lrs", [None] * len(counts))
        optimizers = [with_lr(table.spec.optimizer, lr) for table, lr in zip(self._tables, rates, strict=True)]
        came = [
            None
            if count is None
            else (torch.empty(_count(count, message), dtype=torch.int64), table.spec.empty_rows(count, table.spec.sent))
            for count, table in zip(counts, self._tables, strict=True)
        ]
        tensors = [tensor for each in came if each is not None for tensor in each]
        from_frames(cut_for(message.payload, tensors), tensors)
        gradients: list[RowGradients | None] = []
        for table, given in zip(self._tables, came, strict=True):
            found = None if given is None else RowGradients(given[0], given[1].to(table.spec.computed))
            if found is not None:
                table.require(found)
            gradients.append(found)
        waiting = _Waiting(message.clock, weight, gradients, optimizers)
        self._require_one_rate(message.sender, waiting)
        self._waiting[message.sender] = waiting
        return {}

    def _get(self, message: Message) -> Fields:
        state = self._table(message).state()
        body, payload = pack({f"0.{name}": tensor for name, tensor in state.items()})
        return {"body": body, "payload": payload, "tensor_bytes": sum(map(len, payload))}

    def _set(self, message: Message) -> Fields:
        state = unpack(message.body, message.payload)
        self._table(message).load({name.removeprefix("0."): tensor for name, tensor in state.items()})
        self._changed[message.body["table"]].forget()
        return {}

    def _save(self, message: Message) -> Fields:
        """A disk that is full is no trouble of the server's, nor of the run's, which goes on."""
        body, table = message.body, self._table(message)
        directory, server = Path(body["directory"]), body["server"]
        try:
            files = table.save(directory, number=body["table"], server=server, num_servers=body["num_servers"])
        except OSError as error:
            return {"body": {"error": f"server {server}: {error.strerror} in {directory.parent}"}}
        return {"body": {"files": files}}

    def _load(self, message: Message) -> Fields:
        body = message.body
        files = [RowFile.of_plain(file) for file in body["files"]]
        self._table(message).load_files(
            Path(body["directory"]), files, server=body["server"], num_servers=body["num_servers"]
        )
        return {}

    def _table(self, message: Message) -> Table:
        return self._at(message.body["table"])

    def _at(self, index: Any) -> Table:
        if type(index) is not int or not 0 <= index < len(self._tables):
            raise ValueError(f"there are {len(self._tables)} tables, and none of index {index!r}")
        return self._tables[index]


def _count(count: Any, message: Message) -> int:
    """How many keys. Raises ValueError if the message does not hold as many."""
    num_bytes = sum(len(raw_bytes(frame)) for frame in message.payload)
    if type(count) is not int or not 0 <= 8 * count <= num_bytes:
        raise ValueError(f"{count!r} keys in {num_bytes} bytes")
    return count


def _gradient_bytes(waiting: _Waiting) -> int:
    """Bytes of the gradients, with their keys."""
    return sum(each.keys.nbytes + each.values.nbytes for each in waiting.gradients if each is not None)
