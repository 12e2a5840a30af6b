"""One server's copy of a key range, as a member of the chain of servers that hold it.

Sans-IO, around a `ServerCore`. The head of the chain serves workers. What a request changes it hands on as numbered
entries, and what it says to workers waits until every copy has them. Each other copy does what entries say, in their
order, and hands them on; the last one says that it has them, and each hands that back. What one request changes is in a
copy whole or not at all.

Where servers outlive workers, who takes part is in the copies as well: whoever serves is asked by the launcher, and
answers when every copy has it (`Said`). Copies know how each worker's memory is reached, what is held of its pushes,
and which one counted last.

When a server has died, each chain goes on without it (`reform`). Whoever is left sends again what the next copy has not
said that it has; entries that a copy has already it passes over. A new head has every entry that was acknowledged.
Workers send it what was not answered; contributions that are in its copy it answers, and does not apply again.

A server that has no copy yet gets one from the last of the chain (`Chain.newcomer`): all that this one has, and each
entry from there on. Nobody waits for the newcomer until it has said that it has what was there when it began, and it is
behind the others once it has all that came meanwhile (`Copied`): then the launcher has the chain end with it. The last
one begins when nothing that it has can be lost with it: workers give again what was not closed, but dead ones do not.

Rows of tables may be more than memory holds. They go in pieces, the next one when the newcomer has the one before; of
updates that come meanwhile it gets, in their place among the entries, what they have left of their rows (`Giving`).

A head that lives hands a key range over (`Chain.handover`) when that is so, too. It puts off whatever comes, until all
copies have all that it has done: then these are alike, and any of them can serve (`HandedOver`). What was put off,
workers give again there. Who served is a new copy, made of itself (`stepped_back`): what was not closed is no part of
it. Rows of tables stay where they are. Until the launcher has the other one serve, the handover can be called off, and
the head does what it has put off.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, final

from torch import Tensor

from paceline.errors import PacelineError
from paceline.messages import MORE, Kind, Message, WireError
from paceline.server import entries
from paceline.server.actions import Action, Send
from paceline.server.chains import Chain
from paceline.server.closing import Closed
from paceline.server.newcomer import Newcomer
from paceline.server.server_core import ServerCore
from paceline.server.tables.shards import RowUpdate


class ToServer(NamedTuple):
    """Send this now, to a server that has another copy of the key range."""

    to: int
    message: Message


class Said(NamedTuple):
    """Call this with what the launcher has asked for: all copies have it."""

    say: Callable[[Any], object]
    what: Any


class Copied(NamedTuple):
    """Tell the launcher what has become of the newcomer of this chain."""

    chain: Chain
    why_not: str = ""
    """If it gets no copy from this one, in words."""


class HandedOver(NamedTuple):
    """Tell the launcher that the head of this chain has stopped, and every copy has all that it has."""

    chain: Chain
    why_not: str = ""
    """If it goes on, in words."""


CopyAction = Action | ToServer | Said | Copied | HandedOver


@final
class Replication:
    """
    Args:
        core: of the key range; its shards are built.
        server: which one of the group this is.
        reach: attaches a worker to the core, as another copy did, with its memory if that is in reach; false where it
            was to be.
        is_new: another copy is to give it all that it has.
    """

    def __init__(
        self,
        core: ServerCore,
        *,
        server: int,
        chain: Chain,
        reach: Callable[[Message], bool] = lambda message: True,
        is_new: bool = False,
    ) -> None:
        self._core, self._server, self._chain, self._reach = core, server, chain, reach
        self._is_new, self._lacks_memory = is_new, False
        self._has_failed = False  # to become a copy
        self._said: dict[str, int] = {}  # a newcomer's, with all that it says
        self._newcomer: Newcomer | None = None
        self._num_attempts = 0  # to give a newcomer all that is here
        self._whole: list[Message] = []  # of a head that has stopped
        self._has_told = False  # what becomes of the handover
        self._attached: dict[int, Message] = {}  # by worker, the last entry that says how it is reached
        self._number = self._acknowledged = 0  # of the last entry that is part of this copy, and of all after it
        self._unacknowledged: deque[Message] = deque()
        self._held: deque[tuple[int, CopyAction]] = deque()
        self._change: list[Message] = []  # entries of a change that has not come whole
        self._early: list[Message] = []  # of an epoch that this one has yet to hear of
        self._gradients: list[list[Tensor]] = entries.zeroed(core.parts)
        self._new: list[Message] = []
        for index, part in enumerate(core.parts):
            part.shard.before_closing = partial(self._note, index)
        core.tables.before_updating = self._note_rows

    @property
    def key_range(self) -> int:
        return self._chain.key_range

    @property
    def is_head(self) -> bool:
        return self._chain.head == self._server

    @property
    def has_stopped(self) -> bool:
        """Whether what comes is to be put off, but for word that other copies have what there is: until `reform`."""
        return bool(self._whole)

    def receive(self, message: Message, now_s: float) -> Iterator[CopyAction]:
        """What to do about a worker's message, or another copy's; to the end, or the state is not whole."""
        if message.kind is Kind.REPLICATE:
            yield from self._take(message)
        elif message.kind is Kind.REPLICATED:
            yield from self._hear(message)
        elif not self.is_head:
            yield Send(message.sender, self._core.failure(WireError("it only has a copy")))
        else:
            yield from self._serve(message, now_s)

    def attached(self, message: Message, answer: Message) -> Iterator[CopyAction]:
        """The core has been told that this worker is there."""
        self._attached[message.sender] = entries.of_attached(message)
        return self._commit([Send(message.sender, answer)], [replace(self._attached[message.sender])])

    def part_with(self, worker: int, say: Callable[[Any], object]) -> Iterator[CopyAction]:
        """Do `Attendance.part_with`, and say what every copy has of the worker."""
        return self._commit([Said(say, self._core.attendance.part_with(worker))], [])

    def let_go(
        self, worker: int, counts: Message | None, say: Callable[[Any], object], now_s: float
    ) -> Iterator[CopyAction]:
        """Do `Attendance.let_go` on every copy, and say `decided`: rules that have copies decide for none but
        themselves."""
        actions = list(self._core.attendance.let_go(worker, counts, now_s))
        return self._commit([*actions, Said(say, self._core.attendance.decided)], [entries.of_let_go(worker, counts)])

    def expect(self, worker: int, say: Callable[[Any], object]) -> Iterator[CopyAction]:
        """Do `Attendance.expect` on every copy, and say its clock."""
        clock = self._core.attendance.expect(worker)
        return self._commit([Said(say, clock)], [entries.of_expected(worker)])

    def let_in(self, worker: int, clock: int, say: Callable[[Any], object], now_s: float) -> Iterator[CopyAction]:
        """Do `Attendance.let_in` on every copy."""
        actions = list(self._core.attendance.let_in(worker, clock, now_s))
        return self._commit([*actions, Said(say, None)], [entries.of_let_in(worker, clock)])

    def reform(self, chain: Chain) -> Iterator[CopyAction]:
        """The chain has changed, and this server is still in it, or is to be."""
        self._chain, self._core.epoch = chain, chain.epoch
        self._whole, self._has_told = [], False
        if not self._is_new:
            yield from self._take_place()
        early, self._early = self._early, []
        for entry in early:
            yield from self._take(entry)

    def _take_place(self) -> Iterator[CopyAction]:
        """Go on as the chain is now."""
        chain = self._chain
        if self.is_head:
            self._change.clear()
        is_last = chain.after(self._server) is None
        if self._newcomer is not None and not (is_last and chain.newcomer == self._newcomer.server):
            self._forget_newcomer()
        if is_last and self._newcomer is None:
            self._unacknowledged.clear()
            if chain.newcomer not in (None, self._server):
                self._newcomer = Newcomer(chain.newcomer)
        is_waited_for = not is_last or (self._newcomer is not None and self._newcomer.waits_from is not None)
        yield from self._acknowledge(self._acknowledged if is_waited_for else self._number)
        for entry in () if is_last else list(self._unacknowledged):
            yield self._forward(entry)
        yield from self._go_on()

    def stepped_back(self, chain: Chain, core: ServerCore, reach: Callable[[Message], bool]) -> "Replication":
        """The copy that this server has from here on, where it has stopped and another one serves.

        Args:
            core: a new one of the key range, which gets the tables of the one before.
            reach: as that of this one, for the new core.
        """
        core.take_tables(self._core)
        copy = Replication(core, server=self._server, chain=chain, reach=reach, is_new=True)
        for entry in self._whole:
            copy._repeat(entry)
        assert not copy._lacks_memory, "a worker's memory that was in reach is so no more"
        copy._is_new, copy._acknowledged, copy._early = False, copy._number, self._early
        copy._num_attempts = self._num_attempts
        return copy

    def _serve(self, message: Message, now_s: float) -> Iterator[CopyAction]:
        """What a worker asks."""
        actions = list(self._core.receive(message, now_s))
        said = {action.message.kind for action in actions if isinstance(action, Send)}
        changes = [] if Kind.ERROR in said else entries.of_request(message, self._core.parts)
        if Kind.HELD in said:
            changes.append(entries.of_held(*self._core.intake.held_push(message.sender)))
        return self._commit(actions, changes)

    def _commit(self, actions: Iterable[CopyAction], changes: Iterable[Message]) -> Iterator[CopyAction]:
        """Hand on what the core has changed, and do this when all copies have it."""
        new, self._new = [*self._new, *changes], []
        for entry in new:
            self._number += 1
            entry.clock, entry.flags = self._number, MORE if entry is not new[-1] else 0
            yield from self._hand_on(entry)
        self._held.extend((self._number, action) for action in actions)
        yield from self._release()
        yield from self._go_on()

    def _note(self, index: int, closed: Closed) -> None:
        if self.is_head:
            self._new.append(entries.of_closed(index, self._core, closed))

    def _note_rows(self, updates: Sequence[RowUpdate]) -> None:
        if self.is_head:
            self._new.append(entries.of_rows(self._core.tables, updates))

    def _take(self, entry: Message) -> Iterator[CopyAction]:
        """An entry of the copy before, which may have yet to hear that the epoch has changed."""
        if entry.epoch > self._chain.epoch:  # of who was told of the new chain earlier, behind which others may come
            self._early.append(entry)
            return
        is_of_before = entry.sender == self._chain.before(self._server)
        is_to_count = is_of_before or (entry.epoch == self._chain.epoch and not self._is_new)
        if self.is_head or self._has_failed or not is_to_count:
            return  # of one that is taken for dead, or gave an earlier copy, of which this is none
        try:
            yield from self._take_in(entry)
        except PacelineError as error:
            if self._chain.newcomer != self._server:
                raise
            self._has_failed = True  # what else this server has is none the worse
            yield Copied(self._chain, str(error))

    def _take_in(self, entry: Message) -> Iterator[CopyAction]:
        if self._is_new:
            yield from self._take_whole(entry)
        elif entries.attempt_of(entry) is not None:
            raise WireError("what it has taken has come late, of an attempt before")
        elif entries.is_piece(entry):
            entries.apply(entry, self._core, self._gradients, self._note_reach)
            self._said["pieces"] += 1
            yield from self._acknowledge(self._number)
        elif entry.clock == self._number + len(self._change) + 1:
            self._change.append(entry)
            if not entry.flags & MORE:
                change, self._change = self._change, []
                for each in change:
                    self._repeat(each)
                for each in change:
                    yield from self._hand_on(each)
                yield from self._go_on()
        elif entry.clock <= self._acknowledged:
            yield from self._acknowledge(self._acknowledged)

    def _repeat(self, entry: Message) -> None:
        if entries.is_of_attached(entry):
            self._attached[entry.body["worker"]] = replace(entry)
        entries.apply(entry, self._core, self._gradients, self._note_reach)
        self._number = entry.clock

    def _note_reach(self, message: Message) -> None:
        self._lacks_memory |= not self._reach(message)

    def _take_whole(self, entry: Message) -> Iterator[CopyAction]:
        """Take one entry of the whole copy that the server before sends. Each has the number of the last entry that is
        part of that copy."""
        attempt = entries.attempt_of(entry)
        if attempt is not None:
            self._change.clear()
            self._said = {"attempt": attempt, "pieces": 0}
        elif not self._change:
            return  # of an attempt before this one
        self._change.append(entry)
        if entry.flags & MORE:
            return
        change, self._change = self._change, []
        for each in change:
            self._repeat(each)
        if self._lacks_memory:
            raise WireError("a worker died just then")
        self._is_new = False
        yield from self._acknowledge(self._number)

    def _go_on(self) -> Iterator[CopyAction]:
        """Do what waits until all that is here can be copied."""
        if (self._newcomer is not None or self._chain.handover is not None) and self._core.attendance.can_be_copied:
            yield from self._welcome()
            yield from self._stop()

    def _welcome(self) -> Iterator[CopyAction]:
        """Give the newcomer all that is here, if it is still to be given that."""
        newcomer = self._newcomer
        if newcomer is None or newcomer.attempt:
            return
        self._num_attempts += 1
        try:
            whole = [*self._all_but_tables(), *entries.of_tables(self._core)]
        except WireError as error:
            self._newcomer = None
            yield Copied(self._chain, str(error))
            return
        newcomer.attempt = self._num_attempts
        if self._core.tables.are_open:
            newcomer.giving = self._core.tables.give()
            whole.append(entries.of_states(newcomer.giving.changes()))
        for entry in self._numbered(whole):
            yield self._forward(entry)

    def _stop(self) -> Iterator[CopyAction]:
        """Hand over, if this server is to do so."""
        if self._chain.handover is None or not self.is_head or self._has_told or self.has_stopped:
            return
        try:
            self._whole = self._numbered(self._all_but_tables())
            yield from self._release()
        except WireError as error:
            self._has_told = True
            yield HandedOver(self._chain, str(error))

    def _all_but_tables(self) -> list[Message]:
        """Raises WireError."""
        attached = [
            replace(entry) for worker, entry in self._attached.items() if worker not in self._core.attendance.gone
        ]
        return entries.of_whole(self._core, attached, attempt=self._num_attempts)

    def _numbered(self, whole: list[Message]) -> list[Message]:
        """Number these entries as one change, which brings a copy to where this one is."""
        for entry in whole:
            entry.clock, entry.flags = self._number, MORE if entry is not whole[-1] else 0
        return whole

    def _hear(self, message: Message) -> Iterator[CopyAction]:
        """The copies after this one have all entries up to this."""
        newcomer = self._newcomer
        if message.sender != self._next:
            return
        if newcomer is not None and message.body.get("attempt") != newcomer.attempt:
            return  # of one before
        while self._unacknowledged and self._unacknowledged[0].clock <= message.clock:
            self._unacknowledged.popleft()
        if newcomer is None:
            yield from self._acknowledge(message.clock)
            return
        if newcomer.waits_from is None:
            if message.body.get("pieces") != newcomer.num_pieces:
                return  # it has yet to get the one that is on its way
            piece = newcomer.next_piece()
            if piece is not None:
                yield self._forward(piece)
                return
            newcomer.waits_from = self._number
        if message.clock > self._acknowledged:
            yield from self._acknowledge(message.clock)
        if message.clock >= newcomer.waits_from and not newcomer.is_there:
            newcomer.is_there = True
            yield Copied(self._chain)

    def _forget_newcomer(self) -> None:
        if self._newcomer is not None:
            self._newcomer.end_giving()
        self._newcomer = None

    @property
    def _next(self) -> int | None:
        """Whom entries are sent to."""
        after, newcomer = self._chain.after(self._server), self._newcomer
        return newcomer.server if newcomer is not None and newcomer.attempt else after

    def _hand_on(self, entry: Message) -> Iterator[CopyAction]:
        entry = entry if self._newcomer is None else self._newcomer.instead_of(entry)
        if self._next is not None:
            self._unacknowledged.append(entry)
            yield self._forward(entry)
        if self._next is None or (self._newcomer is not None and self._newcomer.waits_from is None):
            yield from self._acknowledge(entry.clock)

    def _acknowledge(self, number: int) -> Iterator[CopyAction]:
        self._acknowledged = max(self._acknowledged, number)
        if self.is_head:
            yield from self._release()
        else:
            said = Message(Kind.REPLICATED, self._core.epoch, sender=self._server, body={**self._said})
            said.clock = self._acknowledged
            yield ToServer(_required(self._chain.before(self._server)), said)

    def _forward(self, entry: Message) -> ToServer:
        entry.sender, entry.epoch = self._server, self._core.epoch
        return ToServer(_required(self._next), entry)

    def _release(self) -> Iterator[CopyAction]:
        while self._held and self._held[0][0] <= self._acknowledged:
            yield self._held.popleft()[1]
        if self.has_stopped and not self._has_told and self._acknowledged == self._number:
            self._has_told = True
            yield HandedOver(self._chain)


def _required(server: int | None) -> int:
    assert server is not None
    return server
