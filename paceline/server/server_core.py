"""A server's end of the protocol: it takes a message, and says what to do about it, one thing after the other.

Sans-IO: whoever carries messages calls it, gives it the time, and does what it says.
"""

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from paceline.messages import APART, FRAME_BYTES, Kind, Message, WireError
from paceline.server.actions import Action, Send
from paceline.server.admission import ProtocolError
from paceline.server.answering import Answering, Client, with_tensors
from paceline.server.attendance import Attendance
from paceline.server.intake import Intake
from paceline.server.part import Part, build_part, require_fitting
from paceline.server.part_state import initialise, set_state, state_fields
from paceline.server.ranges import in_shards
from paceline.server.spec import ServerSpec
from paceline.server.tables.shards import TableShards
from paceline.server.tables.storage import InMemory, Storage
from paceline.server.whole_pushes import WholePushes
from paceline.server.windows import LEAST_ANSWERS, PIECES_UNDER_WAY, AnswerWindow

_ERROR_LENGTH = 4000


@final
class ServerCore:
    """Holds one key range in shards, and does what workers ask.

    What they push, `intake` takes; who they are, `attendance` knows.

    Args:
        index: which server of the group this is.
        epoch: of the membership.
        new_memory: makes what tables lie in, if not in files.
    """

    def __init__(self, *, index: int, epoch: int, new_memory: Callable[[], Storage] = InMemory) -> None:
        self.index = index
        self._spec: ServerSpec | None = None
        window = AnswerWindow[Message](least_bytes=LEAST_ANSWERS * FRAME_BYTES)
        self._answering = Answering(index=index, epoch=epoch, tables=TableShards(new_memory), window=window)
        self._clients = self._answering.clients
        self.pushes = WholePushes()
        """Where servers outlive workers, what counts of theirs and what is held."""
        self.intake = Intake(self._answering, self.pushes)
        self.attendance = Attendance(self._answering, self.intake, self.pushes)
        self._outlives_workers = False
        self._handlers: dict[Kind, Callable[[Client, Message, float], Iterator[Action]]] = {
            Kind.INITIALISE: self._initialise,
            Kind.EXCHANGE: self.intake.exchange,
            Kind.COUNT: self.intake.count_held,
            Kind.FOLLOW: self.intake.follow,
            Kind.WAIT: self._wait,
            Kind.RECEIVED: self._received,
            Kind.PULL: self._pull,
            Kind.HOW_FAR: lambda client, message, now_s: iter([Send(message.sender, self.message(Kind.OK))]),
            Kind.LEAVE: self._leave,
            Kind.STEP_ASIDE: self._step_aside,
            Kind.COME_BACK: self._come_back,
            Kind.GET_STATE: self._get_state,
            Kind.SET_STATE: self._set_state,
            **dict.fromkeys(self.tables.handlers, self._about_rows),
        }

    @property
    def epoch(self) -> int:
        """The membership's epoch."""
        return self._answering.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._answering.epoch = epoch

    @property
    def parts(self) -> list[Part]:
        return self._answering.parts

    @property
    def tables(self) -> TableShards:
        return self._answering.tables

    @property
    def is_in_turn(self) -> bool:
        """Whether pieces of answers go a few at a time (`Answering.is_in_turn`)."""
        return self._answering.is_in_turn

    @property
    def iteration(self) -> int:
        return self._answering.iteration

    def configure(self, spec: ServerSpec, *, memory: Tensor | None = None) -> None:
        """Build the shards; called once, before the first worker attaches.

        The first server's last shard decides where shards must agree: it has heard of a gradient when all of it came.

        Args:
            memory: laid out like the model, for the parameters, which workers beside then read for themselves.

        Raises:
            UsageError: the aggregator does not fit the rule, or the range.
        """
        ranges = in_shards(spec.pieces, whole=not spec.optimizer.element_wise)
        require_fitting(spec, num_shards=len(ranges))
        rules = [spec.rule.for_another_shard() for _ in ranges]
        if self.index == 0:
            rules[-1] = spec.rule
        built = [build_part(spec, pieces, rule, memory) for pieces, rule in zip(ranges, rules, strict=True)]
        answering = self._answering
        answering.set_parts(built)
        self.intake.configure(spec)
        self.attendance.is_copied_apart = spec.is_copied_apart
        self._outlives_workers = spec.outlives_workers
        # Where a push counts whole, no piece is answered before all have come.
        needs_all = all(part.shard.needs_all for part in self.parts) and not self._outlives_workers
        answering.is_in_turn = len(self.parts) > PIECES_UNDER_WAY and needs_all
        answering.some_read_for_themselves = memory is not None
        self.tables.files = spec.table_files
        self.tables.joins = spec.rule.joins
        self.tables.may_lend = spec.rule.is_free and not spec.outlives_workers
        self.tables.agrees_on_rates = not spec.outlives_workers
        self._spec = spec

    def attach(
        self, message: Message, *, gradients: Tensor | None, parameters: Tensor | None, is_beside: bool
    ) -> dict[str, Any]:
        """A worker says that it is there. Returns what it is to be told.

        Args:
            gradients, parameters: its buffers, laid out like the model, if they are in reach of this server.

        Raises:
            WireError: this server knows nothing of its model yet, or of this worker.
        """
        if self._spec is None:
            raise WireError(f"server {self.index} was asked before it was configured")
        layout = self._spec.layout

        def views(buffer: Tensor) -> list[list[Tensor]]:
            return [[piece.view(layout, buffer) for piece in part.pieces] for part in self.parts]

        def own() -> list[list[Tensor]]:
            before = self._clients.get(message.sender)
            if before is not None and not before.is_beside:
                return before.gradients  # they may hold a push
            return [[torch.zeros_like(tensor) for tensor in part.shard.parameters] for part in self.parts]

        self._clients[message.sender] = Client(
            gradients=views(gradients) if gradients is not None else own(),
            parameters=views(parameters) if parameters is not None else None,
            is_beside=is_beside,
        )
        self._answering.some_are_apart |= bool(message.flags & APART)
        self._answering.has_neighbour |= is_beside
        return {
            "follows": self.parts[-1].shard.follows,
            "is_in_turn": self.is_in_turn,
            "outlives_workers": self._outlives_workers,
            "is_copied_apart": self._spec.is_copied_apart,
        }

    def receive(self, message: Message, now_s: float) -> Iterator[Action]:
        """Say what to do about a worker's message, each thing before the next is decided. The caller goes through to
        the end: before that the state is not whole.

        Where a message is refused, only its sender hears of it. After any other exception the server cannot go on:
        some of its shards may have been updated.
        """
        if message.sender in self.attendance.gone:
            return
        try:
            handler, client = self._handlers.get(message.kind), self._clients.get(message.sender)
            if handler is None or client is None:
                raise WireError(f"refused {message.kind.name} from worker {message.sender}")
            yield from handler(client, message, now_s)
            yield from self._answering.tick(now_s)
        except (ProtocolError, WireError) as error:
            yield Send(message.sender, self.failure(error))

    def take_tables(self, other: "ServerCore") -> None:
        """Have the tables, with their rows, of another core of this key range, which has none then."""
        mine, theirs = self._answering, other._answering
        mine.tables, theirs.tables = theirs.tables, mine.tables

    @property
    def wakes_at_s(self) -> float | None:
        """When `tick` is to be called, if no message comes before; by the clock that messages come with."""
        return self.parts[-1].shard.rule.wakes_at_s if self._answering.is_timed else None

    def tick(self, now_s: float) -> Iterator[Action]:
        """Say what is to be done by now, though no message has come."""
        return self._answering.tick(now_s)

    def failure(self, error: Exception) -> Message:
        """The message that tells a worker why it was refused."""
        text = f"server {self.index}: {type(error).__name__}: {error}"[:_ERROR_LENGTH]
        return self.message(Kind.ERROR, body={"error": text})

    def message(self, kind: Kind, **fields: Any) -> Message:
        return self._answering.message(kind, **fields)

    @property
    def is_quiet(self) -> bool:
        """Whether all workers are beside, and those who have all tensors could go on without this server."""
        active, gone, clients = self.attendance.active, self.attendance.gone, self._clients
        are_here = gone.isdisjoint(active) and all(rank in clients and clients[rank].is_beside for rank in active)
        # Who dies takes rows back with a push that does not count, of which this server has to know.
        has_rows = self.tables.has_waiting or (self._outlives_workers and self.tables.are_open)
        return bool(active) and are_here and not has_rows and all(part.shard.is_quiet for part in self.parts)

    def close(self) -> None:
        """Let go of all memory."""
        self._clients.clear()
        self.tables.close()
        self._answering.set_parts([])

    # --- requests -----------------------------------------------------------------------------------------------

    def _initialise(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        parts = self._answering.parts_of(message)
        for index, part in parts:
            initialise(part, message, None if client.parameters is None else client.parameters[index])
            for worker in self._clients:
                part.shard.pulled(worker)
        if parts[-1][0] == len(self.parts) - 1:
            yield Send(message.sender, self.message(Kind.OK))

    def _wait(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        client.arrived_s = now_s
        for index, part in self._answering.parts_of(message):
            answers = part.shard.wait(message.sender, pause_at=message.pause_at)
            yield from self._answering.answer(index, part, answers, now_s)

    def _received(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        """A worker has one of the answers that go in turn."""
        if not self._answering.window.answered(message.sender, now_s):
            raise WireError(f"refused word from worker {message.sender} of an answer that it was not sent")
        return self._answering.next_in_turn(now_s)

    def _pull(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        for index, part in self._answering.numbered_parts:
            payload = self._answering.give(client, index, part)
            if not client.is_beside:
                yield Send(message.sender, with_tensors(self.message(Kind.ANSWER), index, part, payload))
        if client.is_beside:
            yield Send(message.sender, self.message(Kind.ANSWER, tensor_bytes=self._answering.range_bytes))

    def _leave(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        yield from self.attendance.leave(client, message.sender, now_s)
        yield Send(message.sender, self.message(Kind.OK))

    def _step_aside(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        yield from self.attendance.step_aside(message.sender, now_s)
        yield Send(message.sender, self.message(Kind.OK))

    def _come_back(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        self.attendance.come_back(message.sender)
        yield Send(message.sender, self.message(Kind.OK))

    def _get_state(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        yield Send(message.sender, self.message(Kind.OK, **state_fields(self.parts)))

    def _set_state(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        set_state(self.parts, message)
        yield Send(message.sender, self.message(Kind.OK))

    def _about_rows(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        clock = self.parts[-1].shard.rule.complete if self.parts else 0  # of the shard that rows are updated with
        # What was asked ahead is answered so, that a worker knows it from what it has asked meanwhile.
        kind = Kind.READ_AHEAD if message.kind is Kind.READ_AHEAD else Kind.OK
        yield Send(message.sender, self.message(kind, clock=clock, **self.tables.receive(message)))
