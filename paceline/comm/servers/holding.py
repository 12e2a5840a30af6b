"""What a server holds for one optimizer of a run: its core, the memory of workers on this host, and a loan to them."""

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, final

from paceline.comm.servers.copies import identity_of_server
from paceline.comm.servers.lending import Lending, can_lend
from paceline.comm.servers.line import LINE_BYTES, ServerLine
from paceline.comm.servers.rows_in_view import RowsInView
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.errors import PacelineError, PeerLost
from paceline.messages import Kind, Message, Raw, WireError
from paceline.records import Reporter, UpdateRecord
from paceline.server.actions import Send, Updated
from paceline.server.admission import Decisions
from paceline.server.chains import Chain
from paceline.server.closing import Applied
from paceline.server.replication import Copied, CopyAction, HandedOver, Replication, Said, ToServer
from paceline.server.server_core import ServerCore
from paceline.server.spec import ServerSpec
from paceline.server.tables.storage import InMemory

Say = Callable[[Any], object]
"""Is given what was asked for, when it is there."""


@dataclass
class Neighbour:
    """A worker on this host, as this server reaches it."""

    worker: int
    line: ServerLine
    gradients: SharedBlock
    parameters: SharedBlock
    borrows: bool
    """Whether it serves itself from shards that are lent: all servers of the run are on this host."""
    asked_on_line: bool = False
    """Whether the last request came that way; its answer goes back the same."""

    def close(self, *, keeps_gradients: bool = False) -> None:
        if not keeps_gradients:
            self.gradients.close()
        self.parameters.close()
        self.line.close()


@final
class Holding:
    """
    Args:
        index: which server of the group this is.
        number: which of the run's optimizers it is for.
        epoch: membership epoch; requests of another one are refused.
        reporter: gets a record for every gradient applied.
        send: sends a message to the socket of that identity.
        is_copy: it is of a key range that another server has at the start.
        on_told: told what has become of a new copy, or of a handover.
    """

    def __init__(
        self,
        *,
        index: int,
        number: int,
        epoch: int,
        reporter: Reporter,
        send: Callable[[bytes, Message], None],
        is_copy: bool = False,
        on_told: Callable[[Copied | HandedOver], object] = lambda told: None,
    ) -> None:
        self.core = ServerCore(index=index, epoch=epoch, new_memory=self._new_memory)
        self.identity_of = functools.partial(identity_of, number=number, copy_of=index if is_copy else None)
        """A worker's name."""
        self.neighbours: dict[bytes, Neighbour] = {}
        """By identity."""
        self._reporter, self._send_elsewhere, self._on_told = reporter, send, on_told
        self._spec: ServerSpec | None = None
        self._shared: SharedBlock | None = None
        self._lending: Lending | None = None
        self._replication: Replication | None = None
        self._reached: dict[int, SharedBlock] = {}
        """The gradients of each worker on this host that another copy has told of."""
        self._send_on: Callable[[int, int, Message], None] | None = None
        self._put_off: list[Callable[[], None]] = []
        self.version = 0
        """The version of the chain of copies that the launcher had when this copy was built."""

    @property
    def iteration(self) -> int:
        return max(self.core.iteration, self._lending.iteration if self._lending is not None else 0)

    def configure(self, spec: ServerSpec, *, has_copies: bool = False) -> None:
        """Build the shards; called once, before any worker attaches.

        Args:
            has_copies: `replicate` follows.

        Raises:
            UsageError: the aggregator is unfit.
        """
        num_bytes = spec.layout.num_bytes
        if spec.rule.torn_reads:
            self._shared = SharedBlock.create(num_bytes)
        if can_lend(spec) and not has_copies:  # which would not hear of what workers change themselves
            self._lending = Lending(spec)
        self.core.configure(spec, memory=self._shared.tensor[:num_bytes] if self._shared is not None else None)
        self._spec = spec

    def replicate(self, chain: Chain, *, server: int, send_on: Callable[[int, int, Message], None]) -> None:
        """Be one of several copies, or become one; called once, after `configure`.

        Args:
            server: which one of the group this is.
            send_on: sends, of a key range, a server the message.
        """
        self._send_on, self.version = send_on, chain.version
        is_new = server == chain.newcomer
        self._replication = Replication(self.core, server=server, chain=chain, reach=self._reach, is_new=is_new)

    def reform(self, chain: Chain) -> None:
        """The chain of copies has changed. What was put off is done, or, if another server has come to serve, comes to
        nothing: there it is asked again."""
        if self._replication is None:
            return
        if self._replication.has_stopped and chain.epoch > self.core.epoch:
            self._step_back(self._replication, chain)
        self._do(self._replication.reform(chain))
        put_off, self._put_off = self._put_off, []
        for do in put_off:
            do()

    def _step_back(self, before: Replication, chain: Chain) -> None:
        """Have a copy of what this server has served until now."""
        assert self._spec is not None
        core, neighbours = self.core, [*self.neighbours.values()]
        new = {each.worker for each in neighbours if self._memory_is_read} - self._reached.keys()
        self._reached |= {each.worker: each.gradients for each in neighbours if each.worker in new}
        self.core = ServerCore(index=core.index, epoch=chain.epoch, new_memory=self._new_memory)
        self.core.configure(self._spec.anew())
        self._replication = before.stepped_back(chain, self.core, self._reach)
        self.neighbours.clear()
        core.close()
        for each in neighbours:
            each.close(keeps_gradients=each.worker in new)

    def handle_copy(self, server: int, frames: Sequence[Raw]) -> None:
        """Another copy says something. Raises WireError if it is nothing that the next or the last one would."""
        message = Message.decode(frames, epoch=None)  # epochs are for the chain to judge
        is_of_copy = message.kind in (Kind.REPLICATE, Kind.REPLICATED) and message.sender == server
        if self._replication is None or not is_of_copy:
            raise WireError(f"refused {message.kind.name} from server {server}")
        self._do(self._replication.receive(message, time.perf_counter()))

    def handle(self, identity: bytes, frames: Sequence[Raw]) -> None:
        """Answer one request, and whoever it completes; trouble with it is the asker's. Where there are copies, who
        asks one that does not serve, or asks in another epoch, has yet to hear who does."""
        if self._replication is not None and self._replication.has_stopped:
            self._put_off.append(functools.partial(self.handle, identity, frames))
            return
        try:
            message = Message.decode(frames, epoch=None if self._replication is not None else self.core.epoch)
            if self._replication is not None and (not self._replication.is_head or message.epoch != self.core.epoch):
                return
            is_of_copy = message.kind in (Kind.REPLICATE, Kind.REPLICATED)
            if is_of_copy or identity != self.identity_of(message.sender):
                raise WireError(f"refused a message for worker {message.sender} from {identity!r}")
            self._take_back()
            if message.kind is Kind.ATTACH:
                answer = self._attach(message)
                self._do(self._told_of(message, answer))
                return
        except PacelineError as error:
            self._send(identity, self.core.failure(error))
            return
        self._do((self._replication or self.core).receive(message, time.perf_counter()))
        is_plain = message.kind is Kind.EXCHANGE and not message.flags and message.body.keys() <= {"done"}
        if self._lending is not None and is_plain and self.core.is_quiet:
            workers = {rank: self.neighbours[self.identity_of(rank)] for rank in sorted(self.core.attendance.active)}
            if all(worker.borrows for worker in workers.values()):
                gradients = {rank: astuple(worker.gradients.address) for rank, worker in workers.items()}
                self._lending.lend(self.core.parts, gradients)

    def part_with(self, worker: int, say: Say) -> None:
        """Do what `Attendance.part_with` does, and say its answer once all copies have it.

        The three methods below say theirs likewise.
        """
        self._take_back()
        if self._replication is None:
            say(self.core.attendance.part_with(worker))
        else:
            self._have_copies(lambda copy: copy.part_with(worker, say))

    def let_go(self, worker: int, counts: Message | None, decided: Decisions, say: Say) -> None:
        """Do `Attendance.let_go`, then say what `decided` is. The worker's memory stays: the server may still read what
        it has given."""
        self._take_back()
        now_s = time.perf_counter()
        if self._replication is None:
            self._do(self.core.attendance.let_go(worker, counts, now_s, decided=decided))
            say(dict(self.core.attendance.decided))
        else:
            self._have_copies(lambda copy: copy.let_go(worker, counts, say, now_s))

    def expect(self, worker: int, say: Say) -> None:
        """Do what `Attendance.expect` does."""
        self._take_back()
        if self._replication is None:
            say(self.core.attendance.expect(worker))
        else:
            self._have_copies(lambda copy: copy.expect(worker, say))

    def let_in(self, worker: int, clock: int, say: Say) -> None:
        """Has the core let the worker in, and sends what it answers."""
        self._take_back()
        now_s = time.perf_counter()
        if self._replication is None:
            self._do(self.core.attendance.let_in(worker, clock, now_s))
            say(None)
        else:
            self._have_copies(lambda copy: copy.let_in(worker, clock, say, now_s))

    def _have_copies(self, do: Callable[[Replication], Iterator[CopyAction]]) -> None:
        """Do what the launcher asks whoever serves for."""
        assert self._replication is not None
        if self._replication.has_stopped:
            self._put_off.append(functools.partial(self._have_copies, do))
        elif self._replication.is_head:  # else the launcher asks the one that is
            self._do(do(self._replication))

    def look(self) -> None:
        """Report what workers have done with what was lent to them, and do what is due by now."""
        if self._lending is not None:
            self._report(self._lending.look())
        if self.wakes_in_s <= 0:
            self._do(self.core.tick(time.perf_counter()))

    @property
    def wakes_in_s(self) -> float:
        """How long nothing is due, if no message comes."""
        wakes_at_s = self.core.wakes_at_s
        return math.inf if wakes_at_s is None else wakes_at_s - time.perf_counter()

    def close(self) -> None:
        self.core.close()
        for neighbour in self.neighbours.values():
            neighbour.close()
        for block in self._reached.values():
            block.close()
        if self._shared is not None:
            self._shared.close()
        if self._lending is not None:
            self._lending.close()

    def _new_memory(self) -> InMemory:
        """The memory for tables, which are opened once all workers have attached. Where there are copies, workers ask
        for rows and push all gradients of them: copies would not hear of what workers changed themselves."""
        return RowsInView() if self.neighbours and self._replication is None else InMemory()

    def _do(self, actions: Iterator[CopyAction]) -> None:
        records: list[UpdateRecord] = []
        for action in actions:
            if isinstance(action, Send):
                self._send(self.identity_of(action.to), action.message)
            elif isinstance(action, ToServer):
                self._send_to_copy(action)
            elif isinstance(action, Said):
                action.say(action.what)
            elif isinstance(action, Copied | HandedOver):
                self._on_told(action)
            elif isinstance(action, Updated):
                records += action.records
            else:
                os.sched_yield()  # to the thread that sends: a worker beside, which wakes next, may take its core
        for record in records:
            self._reporter.emit(record)

    def _send_to_copy(self, action: ToServer) -> None:
        """Entries go to the next copy; word that they are there goes back where they came from."""
        if action.message.kind is Kind.REPLICATED:
            self._send_elsewhere(identity_of_server(action.to, self.core.index), action.message)
        elif self._send_on is not None:
            self._send_on(self.core.index, action.to, action.message)

    def _take_back(self) -> None:
        """Whatever is to be done by this server, its shards are to be here."""
        if self._lending is not None:
            returned = self._lending.take_back(self.core.parts)
            self.core.intake.served_themselves(returned.counted)
            self._report(returned.applied)

    def _report(self, applied: Sequence[Applied]) -> None:
        for one in applied:
            self._reporter.emit(UpdateRecord(self.core.index, one.iteration, one.worker, one.clock, one.staleness))

    def _send(self, identity: bytes, message: Message) -> None:
        neighbour = self.neighbours.get(identity)
        if neighbour is not None and neighbour.asked_on_line:
            neighbour.line.send(message.encode())
        else:
            self._send_elsewhere(identity, message)

    def _told_of(self, message: Message, answer: Message) -> Iterator[CopyAction]:
        """A worker has attached, and is answered so."""
        if self._replication is None or self._spec is None or not self._spec.outlives_workers:
            return iter([Send(message.sender, answer)])
        return self._replication.attached(message, answer)

    def _reach(self, message: Message) -> bool:
        """A worker has attached to another copy: open its gradients, which are to be read here if both die. Where they
        are open they stay so: when it attaches anew, as another copy serves, it may have died since. False: they were
        to be had, and are not."""
        assert self._spec is not None
        num_bytes, worker = self._spec.layout.num_bytes, message.sender
        is_in_reach = bool(message.body) and self._memory_is_read
        if is_in_reach and worker not in self._reached:
            with contextlib.suppress(PeerLost):
                address = _address(message.body.get("gradients"), least_bytes=num_bytes)
                self._reached[worker] = SharedBlock.open(address)
        gradients = self._reached[worker].tensor[:num_bytes] if worker in self._reached else None
        self.core.attach(message, gradients=gradients, parameters=None, is_beside=gradients is not None)
        return gradients is not None or not is_in_reach

    @property
    def _memory_is_read(self) -> bool:
        """Whether copies read gradients in workers' memory. A worker says nothing of it to a server on another host,
        nor is that to be opened on a third."""
        return self._spec is not None and not self._spec.is_copied_apart

    def _attach(self, message: Message) -> Message:
        """Open the memory of a worker on this host, in place of what it had before. Returns what it is told."""
        identity = self.identity_of(message.sender)
        if identity in self.neighbours:
            self.neighbours.pop(identity).close()
        if self._spec is None or not message.body:
            about = self.core.attach(message, gradients=None, parameters=None, is_beside=False)
        else:
            num_bytes = self._spec.layout.num_bytes
            gradients, parameters = (
                SharedBlock.open(_address(message.body.get(name), least_bytes=num_bytes))
                for name in ("gradients", "parameters")
            )
            line = ServerLine(_address(message.body.get("line"), least_bytes=LINE_BYTES))
            has_place = self._lending is not None and message.sender < self._lending.num_places
            borrows = has_place and message.body.get("borrows") is True
            self.neighbours[identity] = Neighbour(message.sender, line, gradients, parameters, borrows)
            about = self.core.attach(
                message,
                gradients=gradients.tensor[:num_bytes],
                parameters=parameters.tensor[:num_bytes],
                is_beside=True,
            )
            if self._shared is not None:
                about["parameters"] = astuple(self._shared.address)
            if self._lending is not None and has_place:
                about["loan"] = {"address": astuple(self._lending.address), "num_places": self._lending.num_places}
        return self.core.message(Kind.OK, body=about)


def _address(numbers: Any, *, least_bytes: int) -> BlockAddress:
    """Raises WireError if these are not the numbers of a segment of at least that size."""
    is_plain = isinstance(numbers, list) and len(numbers) == 4 and all(type(n) is int and n >= 0 for n in numbers)
    if not is_plain or numbers[2] < least_bytes:
        raise WireError(f"refused {numbers!r} as the address of {least_bytes} bytes of shared memory")
    return BlockAddress(*numbers)


@functools.lru_cache
def identity_of(worker: int, number: int = 0, copy_of: int | None = None) -> bytes:
    """A worker's name on a server's socket, where it has one for each of the run's optimizers, and for each key range
    whose copy the server has taken over."""
    name = f"worker-{worker}.{number}" if number else f"worker-{worker}"
    return (name if copy_of is None else f"{name}@{copy_of}").encode()


def key_range_of(identity: bytes, own: int) -> int:
    """Read from a worker's name which key range it talks to; a name without one means `own`, the range that the server
    has from the start. A stranger's name may say any number."""
    _, _, copy_of = identity.partition(b"@")
    return int(copy_of) if copy_of.isdigit() else own
