"""A worker's end of what it asks servers about tables: which keys go to which server, and what is made of the answers.

Sans-IO, like `ClientCore`, and one conversation at a time.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from paceline.errors import NotWritten
from paceline.messages import Kind, Message, Raw, WireError, cut_for, from_frames, to_frames
from paceline.row_file import RowFile
from paceline.server.actions import Send
from paceline.server.state import pack, unpack
from paceline.server.tables.changes import Changes, Replaced
from paceline.server.tables.dividing import divided, joined
from paceline.server.tables.hashing import each_owns, mixed
from paceline.server.tables.spec import RowGradients, TableSpec

Given = tuple[dict[str, Any], list[Tensor]]
"""What a server is given about all tables: plain data, and tensors."""


@final
class TableClient:
    """
    Args:
        epoch: of the membership.
    """

    def __init__(self, specs: Sequence[TableSpec], *, rank: int, epoch: int, num_servers: int) -> None:
        self.what = ""
        """The present conversation is about, in words."""
        self.moved_bytes = 0
        """Bytes of its messages so far."""
        self._specs = tuple(specs)
        self._rank, self._epoch, self._num_servers = rank, epoch, num_servers
        self._answers: dict[int, Message | None] = {}
        """By server that was asked: what it has said."""
        self._asked: dict[int, Message] = {}
        """By each of these servers: what it was asked, until all is done."""
        self._error: WireError | None = None
        self._read: dict[int, list[Tensor]] = {}
        """By table whose rows were asked for last: which of them each server has."""
        self._is_ahead: Mapping[int, Tensor] = {}
        """By table, which keys were read ahead: a mask."""
        self._ahead: Mapping[int, Tensor] = {}
        """By table, these keys' rows as first received."""
        self._followed: Sequence[int] = ()

    # --- conversations ------------------------------------------------------------------------------------------

    def open(self) -> list[Send]:
        """Have every server make its part of the tables."""
        body = {"tables": [spec.plain() for spec in self._specs], "num_servers": self._num_servers}
        return self._ask("opening tables", Kind.OPEN_TABLES, [(body, [])] * self._num_servers)

    def read(
        self,
        wanted: Mapping[int, Tensor],
        *,
        ahead: "TableClient | None" = None,
        is_ahead: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> list[Send]:
        """Ask for the rows of each table's keys; servers that have none of them are not asked.

        Args:
            ahead: has read some of them ahead, of which servers say what has changed.
            is_ahead: of each table's keys, which these are.
        """
        self._read = {table: self._places(keys) for table, keys in wanted.items()}
        self._is_ahead, self._ahead = is_ahead, {} if ahead is None else ahead.rows()
        requests = [self._reading(server, wanted) for server in range(self._num_servers)]
        return self._ask(f"rows of table {self._names(wanted)}", Kind.READ_ROWS, requests)

    def read_ahead(self, wanted: Mapping[int, Tensor]) -> list[Send]:
        """Ask for rows that another of these clients is to `read` with the next batch."""
        self._read = {table: self._places(keys) for table, keys in wanted.items()}
        requests = [self._reading(server, wanted) for server in range(self._num_servers)]
        return self._ask(f"rows of table {self._names(wanted)}, ahead", Kind.READ_AHEAD, requests)

    def _names(self, tables: Iterable[int]) -> str:
        return " and ".join(repr(self._specs[table].name) for table in tables)

    def _reading(self, server: int, wanted: Mapping[int, Tensor]) -> Given | None:
        """What one server is asked; none: it has no row of these."""
        new, ahead = self._of_server(server)
        keys = [wanted[table].index_select(0, places) for table, places in new.items()]
        body = {
            "tables": list(new),
            "counts": [len(each) for each in keys],
            **({"since": list(ahead)} if ahead else {}),
        }
        return (body, keys) if new or ahead else None

    def _of_server(self, server: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """By table, where this server's rows are among those that were asked for; and those that were read ahead."""
        new, ahead = {}, {}
        for table, by_server in self._read.items():
            places = by_server[server]
            if table in self._is_ahead:
                is_ahead = self._is_ahead[table][places]
                places, ahead[table] = places[~is_ahead], places[is_ahead]
            new[table] = places
        return _some(new), _some(ahead)

    def changed(self, tables: Sequence[int], *, looks: bool = False) -> list[Send]:
        """Ask for the rows of these tables that have changed since this worker asked last; if it only `looks`, it asks
        for these again."""
        self._followed = tables
        body = {"tables": list(tables), **({"looks": True} if looks else {})}
        return self._ask("changed rows", Kind.CHANGED_ROWS, [(body, [])] * self._num_servers)

    def show(self) -> list[Send]:
        """Ask where workers on a server's host see its rows, and how many it has."""
        return self._ask("where rows are", Kind.SHOW_ROWS, [({}, [])] * self._num_servers)

    def push(
        self, gradients: Sequence[RowGradients | None], *, weight: float, lrs: Sequence[float | None] = (), clock: int
    ) -> list[Send]:
        """Give every server the gradients of its rows, for the update that the worker's next push of the model is for.

        Args:
            gradients: for each table; none: it was not used.
            lrs: for each table, the learning rate; none, also as a whole: its optimizer's own.
            clock: of that push.
        """
        parts = self.parts(gradients, weight=weight, lrs=lrs)
        return self._ask("gradients of rows", Kind.PUSH_ROWS, parts, clock=clock)

    def parts(
        self, gradients: Sequence[RowGradients | None], *, weight: float, lrs: Sequence[float | None] = ()
    ) -> list[Given]:
        """What `push` gives each server."""
        rates = {"lrs": list(lrs)} if any(lr is not None for lr in lrs) else {}
        requests: list[Given] = [({"weight": weight, "counts": [], **rates}, []) for _ in range(self._num_servers)]
        for spec, each in zip(self._specs, gradients, strict=True):
            if each is None:
                for body, _ in requests:
                    body["counts"].append(None)
                continue
            values = each.values.to(spec.sent)
            for (body, tensors), own in zip(requests, self._places(each.keys), strict=True):
                body["counts"].append(len(own))
                tensors += [each.keys.index_select(0, own), values.index_select(0, own)]
        return requests

    def get_state(self, table: int) -> list[Send]:
        return self._ask("all rows", Kind.GET_ROWS, [({"table": table}, [])] * self._num_servers)

    def set_state(self, table: int, state: Mapping[str, Tensor]) -> list[Send]:
        requests = []
        for part in divided(state, self._num_servers):
            body, _ = pack({f"0.{name}": tensor for name, tensor in part.items()})
            requests.append(({"table": table, **body}, list(part.values())))
        return self._ask("all rows", Kind.SET_ROWS, requests)

    def save(self, table: int, directory: Path) -> list[Send]:
        """Have every server write its rows to files there."""
        return self._ask("saving rows", Kind.SAVE_ROWS, self._about_files(table, directory, {}))

    def load(self, table: int, directory: Path, files: Sequence[RowFile]) -> list[Send]:
        """Have every server read its rows from these files, whoever wrote them."""
        return self._ask("loading rows", Kind.LOAD_ROWS, self._about_files(table, directory, {"files": list(files)}))

    def _about_files(
        self, table: int, directory: Path, more: Mapping[str, Any]
    ) -> list[tuple[dict[str, Any], list[Tensor]]]:
        same = {"table": table, "directory": str(directory), "num_servers": self._num_servers, **more}
        return [({**same, "server": server}, []) for server in range(self._num_servers)]

    # --- answers ------------------------------------------------------------------------------------------------

    def receive(self, index: int, answer: Message) -> Iterator[Send]:
        """A server's answer has come; nothing is to be sent for it."""
        self.moved_bytes += answer.num_bytes
        if answer.kind is Kind.ERROR:
            self._error = WireError(f"{self.what}: {answer.body.get('error')}")
        else:
            self._answers[index] = answer
        return iter(())

    def ask_again(self, index: int) -> list[Send]:
        """What to send a server that has just taken another's place, of what that owed an answer to."""
        if index not in self.due:
            return []
        self.moved_bytes += self._asked[index].num_bytes
        return [Send(index, self._asked[index])]

    @property
    def is_done(self) -> bool:
        """Whether all that is due has come, or a server refused."""
        return self._error is not None or not self.due

    @property
    def due(self) -> list[int]:
        """Servers that owe an answer."""
        return [index for index, answer in self._answers.items() if answer is None]

    def require_done(self) -> None:
        """Raises WireError if a server refused; the message says which, and why."""
        self._asked.clear()  # which may hold a table's state
        if self._error is not None:
            raise self._error

    def rows(self) -> dict[int, Tensor]:
        """By table: the rows that were asked for, in the order of the keys, shape (keys, dim)."""
        found = {table: self._specs[table].empty_rows(sum(map(len, places))) for table, places in self._read.items()}
        for table, came in self._ahead.items():
            found[table][self._is_ahead[table]] = came
        for server, answer in self._answers.items():
            if answer is not None:
                new, ahead = self._of_server(server)
                counts = answer.body.get("changed", [])
                if len(counts) != len(ahead):
                    raise WireError(f"a server tells of {len(counts)} tables instead of {len(ahead)}")
                rows = [self._specs[table].empty_rows(len(places)) for table, places in new.items()]
                replaced = [
                    Replaced(torch.empty(count, dtype=torch.int32), self._specs[table].empty_rows(count))
                    for table, count in zip(ahead, counts, strict=True)
                ]
                tensors = [*rows, *(tensor for each in replaced for tensor in each)]
                from_frames(cut_for(answer.payload, tensors), tensors)
                for (table, places), own in zip(new.items(), rows, strict=True):
                    found[table].index_copy_(0, places, own)
                for (table, places), (changed, own) in zip(ahead.items(), replaced, strict=True):
                    found[table].index_copy_(0, places[changed], own)
        return found

    def changes(self) -> dict[int, Changes]:
        """By table that was asked for: what has changed. Raises WireError if a server tells of other tables."""
        found: dict[int, list[Changes]] = {table: [] for table in self._followed}
        for answer in self._answers.values():
            if answer is not None:
                counts = answer.body["counts"]
                if len(counts) != len(found):
                    raise WireError(f"a server tells of {len(counts)} tables instead of {len(found)}")
                parts = [
                    Changes(torch.empty(count, dtype=torch.int64), self._specs[table].empty_rows(count))
                    for table, count in zip(found, counts, strict=True)
                ]
                tensors = [tensor for part in parts for tensor in part]
                from_frames(cut_for(answer.payload, tensors), tensors)
                for own, part in zip(found.values(), parts, strict=True):
                    own.append(part)
        return {table: Changes(*map(torch.cat, zip(*own, strict=True))) for table, own in found.items()}

    def complete(self, table: int) -> Tensor:
        """For each row of this table that was asked for, the clock before which it has all updates."""
        places = self._read[table]
        clocks = torch.empty(sum(map(len, places)), dtype=torch.int64)
        for server, answer in self._answers.items():
            if answer is not None:
                clocks[places[server]] = answer.clock
        return clocks

    def shown(self) -> list[Mapping[str, Any]]:
        """By server; empty where it shows none."""
        return [answer.body for _, answer in sorted(self._answers.items()) if answer is not None]

    def counts(self, table: int) -> dict[str, int]:
        """The counts of all servers together, as `Table.counts` gives them."""
        total: Counter[str] = Counter()
        for shown in self.shown():
            total.update(shown["tables"][table]["counts"])
        return dict(total)

    def saved(self) -> list[RowFile]:
        """Raises NotWritten, which says why, if a server could not."""
        bodies = [answer.body for answer in self._answers.values() if answer is not None]
        for body in bodies:
            if "error" in body:
                raise NotWritten(f"cannot write rows: {body['error']}")
        return [RowFile.of_plain(file) for body in bodies for file in body["files"]]

    def state(self) -> dict[str, Tensor]:
        """The state of the table that was asked for, as `Table.state` gives it."""
        parts = []
        for answer in self._answers.values():
            if answer is not None:
                state = unpack(answer.body, answer.payload)
                parts.append({name.removeprefix("0."): tensor for name, tensor in state.items()})
        return joined(parts)

    # ------------------------------------------------------------------------------------------------------------

    def _places(self, keys: Tensor) -> list[Tensor]:
        """For each server, where among these keys its own are, in their order."""
        return each_owns(mixed(keys), self._num_servers)

    def _ask(
        self,
        what: str,
        kind: Kind,
        requests: Sequence[tuple[Mapping[str, Any], Sequence[Tensor]] | None],
        *,
        clock: int = 0,
    ) -> list[Send]:
        """Each server that there is a request for is to answer once."""
        self.what, self.moved_bytes, self._error, self._answers, self._asked = what, 0, None, {}, {}
        sends = []
        for index, request in enumerate(requests):
            if request is None:
                continue
            body, tensors = request
            payload: list[Raw] = list(to_frames(tensors))
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            message = Message(
                kind,
                self._epoch,
                sender=self._rank,
                clock=clock,
                body=body,
                payload=payload,
                tensor_bytes=num_bytes,
            )
            self._answers[index], self._asked[index] = None, message
            self.moved_bytes += message.num_bytes
            sends.append(Send(index, message))
        return sends


def _some(places: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {table: each for table, each in places.items() if len(each)}
