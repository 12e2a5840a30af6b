"""A server's end of the protocol: a message in, then what to do about it, one thing after the other.

Sans-IO: whoever carries messages calls it, gives it the time, and does what it says.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from paceline.codec import TensorCodec
from paceline.elastic.lanes import Done
from paceline.messages import (
    ALL_SHARDS,
    APART,
    FRAME_BYTES,
    HOLD,
    STOP,
    UNCODED,
    VOID,
    Kind,
    Message,
    Raw,
    WireError,
    from_frames,
    split_frames,
)
from paceline.server.actions import Action, Send
from paceline.server.admission import Decisions, ProtocolError
from paceline.server.answering import Answering, Client, with_tensors
from paceline.server.coded_push import decode_push
from paceline.server.part import Part, build_part, require_fitting
from paceline.server.part_state import initialise, set_state, state_fields
from paceline.server.ranges import in_shards
from paceline.server.spec import ServerSpec
from paceline.server.tables.shards import TableShards
from paceline.server.tables.storage import InMemory, Storage
from paceline.server.whole_pushes import Parted, WholePushes
from paceline.server.windows import LEAST_ANSWERS, PIECES_UNDER_WAY, AnswerWindow

_ERROR_LENGTH = 4000
_ABOUT = ("sender", "weight", "kind", "share")  # a contribution


@final
class ServerCore:
    """Holds one key range in shards, and answers workers.

    Args:
        index: which server of the group this is.
        epoch: of the membership.
        new_memory: makes what tables lie in, if not in files.
    """

    def __init__(self, *, index: int, epoch: int, new_memory: Callable[[], Storage] = InMemory) -> None:
        self.index = index
        self._spec: ServerSpec | None = None
        self._tables = TableShards(new_memory)
        window = AnswerWindow[Message](least_bytes=LEAST_ANSWERS * FRAME_BYTES)
        self._answering = Answering(index=index, epoch=epoch, tables=self._tables, window=window)
        self._clients = self._answering.clients
        self._pushes = WholePushes()  # where servers outlive workers
        self._outlives_workers = False
        self._gone: set[int] = set()
        self._all_parts: list[tuple[int, Part]] = []
        self._is_timed = False
        self._handlers: dict[Kind, Callable[[Client, Message, float], Iterator[Action]]] = {
            Kind.INITIALISE: self._initialise,
            Kind.EXCHANGE: self._exchange,
            Kind.COUNT: self._count_held,
            Kind.FOLLOW: self._follow,
            Kind.WAIT: self._wait,
            Kind.RECEIVED: self._received,
            Kind.PULL: self._pull,
            Kind.HOW_FAR: lambda client, message, now_s: iter([Send(message.sender, self.message(Kind.OK))]),
            Kind.LEAVE: self._leave,
            Kind.STEP_ASIDE: self._step_aside,
            Kind.COME_BACK: self._come_back,
            Kind.GET_STATE: self._get_state,
            Kind.SET_STATE: self._set_state,
            **dict.fromkeys(self._tables.handlers, self._about_rows),
        }

    @property
    def epoch(self) -> int:
        """Of the membership."""
        return self._answering.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._answering.epoch = epoch

    @property
    def parts(self) -> list[Part]:
        return self._answering.parts

    @property
    def tables(self) -> TableShards:
        return self._tables

    @property
    def is_in_turn(self) -> bool:
        """As `Answering.is_in_turn`."""
        return self._answering.is_in_turn

    @property
    def iteration(self) -> int:
        return self.parts[-1].shard.iteration if self.parts else 0

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
        answering, self._all_parts = self._answering, list(enumerate(built))
        answering.parts, answering.range_bytes = built, sum(part.tensor_bytes for part in built)
        self._outlives_workers = spec.outlives_workers
        # Where a push counts whole, no piece is answered before all have come.
        needs_all = all(part.shard.needs_all for part in self.parts) and not self._outlives_workers
        answering.is_in_turn = len(self.parts) > PIECES_UNDER_WAY and needs_all
        answering.some_read_for_themselves = memory is not None
        self._is_timed = self.parts[-1].shard.rule.is_timed
        self._tables.files = spec.table_files
        self._tables.joins = spec.rule.joins
        self._tables.may_lend = spec.rule.is_free and not spec.outlives_workers
        self._tables.agrees_on_rates = not spec.outlives_workers
        self._spec = spec

    def attach(
        self, message: Message, *, gradients: Tensor | None, parameters: Tensor | None, is_beside: bool
    ) -> dict[str, Any]:
        """A worker says that it is there; what it is to be told.

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
                return before.gradients  # in which a push may be held
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
        """What to do about a worker's message, each thing before the next is decided; to the end, or the state is not
        whole.

        A message that is refused is the asker's trouble. Any other exception is the server's, which cannot go on: some
        of its shards may have been updated.
        """
        if message.sender in self._gone:
            return
        try:
            handler, client = self._handlers.get(message.kind), self._clients.get(message.sender)
            if handler is None or client is None:
                raise WireError(f"refused {message.kind.name} from worker {message.sender}")
            yield from handler(client, message, now_s)
            if self._is_timed:
                yield from self.tick(now_s)
        except (ProtocolError, WireError) as error:
            yield Send(message.sender, self.failure(error))

    def part_with(self, worker: int) -> Parted:
        """The worker is gone: nothing is heard of it from here on. Returns what is here of its pushes."""
        self._gone.add(worker)
        client, spec = self._clients.get(worker), self._spec
        reaches_memory = client is not None and client.is_beside and spec is not None and not spec.is_copied_apart
        return self._pushes.parted(worker, reaches_memory=reaches_memory)

    def let_go(
        self, worker: int, counts: Message | None, now_s: float, *, decided: Decisions = MappingProxyType({})
    ) -> Iterator[Action]:
        """Go on without a worker, of which nothing is heard from here on, and which is told nothing. Nothing is done a
        second time.

        Args:
            counts: its last push that is to count, as `what_counts` says. If it does not do so here yet, its tensors
                are those that have come, or those in the worker's memory.
            decided: what the first server, which is told before the others, has decided by then (`decided`).
        """
        self._gone.add(worker)
        client = self._clients.get(worker)
        if client is None:
            return
        lacks = counts is not None and self._pushes.lacks(counts)
        taking = self._count(client, counts, self._all_parts, now_s) if counts is not None and lacks else ()
        learning = self._learn(decided, now_s)
        leaving = self._leave(client, Message(Kind.LEAVE, self.epoch, sender=worker), now_s)
        waiting = self.tick(now_s) if self._is_timed else ()
        for action in itertools.chain(taking, learning, leaving, waiting):
            if not (isinstance(action, Send) and action.to == worker):
                yield action
        self._pushes.let_go(worker)
        last = self._pushes.last(worker)
        self._tables.let_go(worker, clock=None if last is None else last.clock)

    @property
    def decided(self) -> Decisions:
        """What this server has decided for others, as far as one of them may not have been told. Workers tell them,
        unless they die."""
        return self.parts[-1].shard.rule.decided if self.parts else {}

    def _learn(self, decided: Decisions, now_s: float) -> Iterator[Action]:
        for index, part in self._all_parts if decided else ():
            yield from self._answering.answer(index, part, part.shard.learn(decided), now_s)

    def expect(self, worker: int) -> int:
        """A worker that has attached is to take part from here on. Returns the clock that it is expected at: under bsp
        no update of a later one is made here without it. Nothing is done a second time."""
        for part in self.parts:
            if worker not in part.shard.rule.active:
                part.shard.join(worker)
        return max(part.shard.rule.clock_of(worker) for part in self.parts)

    def let_in(self, worker: int, clock: int, now_s: float) -> Iterator[Action]:
        """All servers expect the worker, the last of them at this clock, for which it pushes first."""
        for index, part in self._all_parts:
            yield from self._answering.answer(index, part, part.shard.begin_with(worker, clock), now_s)

    @property
    def can_be_copied(self) -> bool:
        """Whether all that is here and not closed comes again if it is lost: nothing of workers that are gone."""
        shards = [part.shard for part in self.parts]
        return all(self._gone.isdisjoint(shard.rule.active) and shard.is_repeatable for shard in shards)

    @property
    def gone(self) -> Collection[int]:
        """Workers of which nothing is heard any more."""
        return self._gone

    @property
    def pushes(self) -> WholePushes:
        return self._pushes

    def take_tables(self, other: "ServerCore") -> None:
        """Have the tables, with their rows, of another core of this key range, which has none then."""
        self._tables, other._tables = other._tables, self._tables
        for core in (self, other):
            core._answering.tables = core._tables

    def last_push(self, worker: int) -> Message | None:
        """That counts of this worker's, without its tensors."""
        return self._pushes.last(worker)

    def copy_count(self, push: Message) -> None:
        """A shard has taken a part of it, as another copy of this key range did."""
        self._pushes.count(push)

    def held_push(self, worker: int) -> tuple[Message, list[Tensor]]:
        """What the worker has pushed that is held: without tensors, and these."""
        gradients = self._clients[worker].gradients
        return self._pushes.holds(worker), [tensor for shard in gradients for tensor in shard]

    def copy_held(self, push: Message, frames: Sequence[Raw]) -> None:
        """Another copy of this key range holds this push, with tensors in frames if there are any."""
        client = self._clients[push.sender]
        if frames and not client.is_beside:
            from_frames(frames, [tensor for shard in client.gradients for tensor in shard])
        self._pushes.hold(push)

    @property
    def wakes_at_s(self) -> float | None:
        """When `tick` is to be called, if no message comes before; by the clock that messages come with."""
        return self.parts[-1].shard.rule.wakes_at_s if self._is_timed else None

    def tick(self, now_s: float) -> Iterator[Action]:
        """What to do because it is that late. The shard that decides for others is the only one that looks."""
        part = self.parts[-1]
        yield from self._answering.answer(len(self.parts) - 1, part, part.shard.tick(now_s), now_s)

    def failure(self, error: Exception) -> Message:
        """What the asker is told."""
        text = f"server {self.index}: {type(error).__name__}: {error}"[:_ERROR_LENGTH]
        return self.message(Kind.ERROR, body={"error": text})

    def message(self, kind: Kind, **fields: Any) -> Message:
        return Message(kind, self.epoch, sender=self.index, iteration=self.iteration, **fields)

    @property
    def is_quiet(self) -> bool:
        """Whether all workers are beside, and those who have all tensors could go on without this server."""
        active, clients = self.active, self._clients
        are_here = self._gone.isdisjoint(active) and all(rank in clients and clients[rank].is_beside for rank in active)
        # Who dies takes rows back with a push that does not count, of which this server has to know.
        has_rows = self._tables.has_waiting or (self._outlives_workers and self._tables.are_open)
        return bool(active) and are_here and not has_rows and all(part.shard.is_quiet for part in self.parts)

    @property
    def active(self) -> Collection[int]:
        """Workers that take part."""
        return self.parts[-1].shard.rule.active if self.parts else ()

    def served_themselves(self, counted: Mapping[int, tuple[int, Done]]) -> None:
        """Workers have updated the shards, which are this server's again.

        Args:
            counted: of those that have pushed: the clock of the last gradient that counts here, and what the worker had
                done then.
        """
        if not self._outlives_workers:
            return
        for worker, (clock, done) in counted.items():
            body = {"done": list(done)}
            self._pushes.count(Message(Kind.EXCHANGE, self.epoch, sender=worker, clock=clock, body=body))
            for part in self.parts:
                part.shard.counted(worker, clock)

    def decode_s(self, message: Message) -> float:
        """How long a core decodes a worker's push, where time is simulated."""
        codec = self._codec_of(message)
        num_bytes = sum(part.tensor_bytes for _, part in self._parts_of(message))
        return 0.0 if codec is None else codec.seconds_per_gbyte[1] * num_bytes / 1e9

    def close(self) -> None:
        """Let go of all memory."""
        self._clients.clear()
        self._tables.close()
        self._answering.parts, self._all_parts = [], []
        self._is_timed = False

    # --- requests -----------------------------------------------------------------------------------------------

    def _initialise(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        parts = self._parts_of(message)
        for index, part in parts:
            initialise(part, message, None if client.parameters is None else client.parameters[index])
            for worker in self._clients:
                part.shard.pulled(worker)
        if parts[-1][0] == len(self.parts) - 1:
            yield Send(message.sender, self.message(Kind.OK))

    def _exchange(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        client.arrived_s = now_s
        parts = self._parts_of(message)
        if "rows" in message.body:
            message = self._take_rows(client, message, parts)
        if client.parameters is None and not message.flags & VOID:
            for index, _ in parts:
                self._read_push(message, index, client.gradients[index])
        if self._outlives_workers and (not client.is_beside or message.flags & HOLD):
            if not self._pushes.has_all(message, num_shards=len(self.parts)):
                return
            # A worker asks anew when another server has taken over, which may have counted it.
            if message.flags & HOLD and self._pushes.lacks(message):
                self._pushes.hold(message)
                yield Send(message.sender, self.message(Kind.HELD))
                return
            parts = self._all_parts
        yield from self._count(client, message, parts, now_s)

    def _count_held(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        client.arrived_s = now_s
        if self._pushes.lacks(message):  # else the server before has counted it, and the push itself is answered
            push = self._pushes.held(message.sender, clock=message.clock)
            yield from self._count(client, push, self._all_parts, now_s)

    def _count(
        self, client: Client, message: Message, parts: Sequence[tuple[int, Part]], now_s: float
    ) -> Iterator[Action]:
        """Give these shards what has been pushed."""
        is_void, body = bool(message.flags & VOID), message.body
        about = {name: body[name] for name in _ABOUT if name in body} if body else {}
        groups = body.get("groups")
        if self._outlives_workers:
            self._pushes.count(message)
        for index, part in parts:
            answers = part.shard.push(
                message.sender,
                message.clock,
                None if is_void else client.gradients[index],
                pause_at=message.pause_at,
                stop=bool(message.flags & STOP),
                groups=part.own_groups(groups) if groups is not None else None,
                **about,
            )
            yield from self._answering.answer(index, part, answers, now_s)
        if "contributors" in body:
            yield from self._follow(client, message, now_s)

    def _take_rows(self, client: Client, message: Message, parts: Sequence[tuple[int, Part]]) -> Message:
        """A push has gradients of rows behind those of the model. Have the tables take them, and return the rest."""
        is_here = client.parameters is not None or message.flags & VOID
        own, rows = split_frames(message.payload, 0 if is_here else sum(part.tensor_bytes for _, part in parts))
        self._tables.receive_push(replace(message, payload=rows))
        return replace(message, payload=own)

    def _read_push(self, message: Message, index: int, gradients: Sequence[Tensor]) -> None:
        codec = self._codec_of(message)
        if codec is None:
            from_frames(message.payload, gradients)
        else:
            decode_push(codec, message, gradients, server=self.index, shard=index)

    def _codec_of(self, push: Message) -> TensorCodec | None:
        """What the push has come through, if it did not come as it is."""
        return None if self._spec is None or push.flags & UNCODED else self._spec.codec

    def _follow(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        """A worker brings what the first server decided."""
        clock, contributors = message.body.get("goes_on_at"), message.body.get("contributors")
        if type(clock) is not int or not isinstance(contributors, list | tuple):
            raise WireError(f"refused {contributors!r} as those whose gradients formed the clock before {clock!r}")
        if not any(part.shard.follows for part in self.parts):
            raise ProtocolError(f"worker {message.sender} brings a decision to a server that decides for itself")
        return self._answering.tell_followers(message.sender, clock, contributors, now_s)

    def _wait(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        client.arrived_s = now_s
        for index, part in self._parts_of(message):
            answers = part.shard.wait(message.sender, pause_at=message.pause_at)
            yield from self._answering.answer(index, part, answers, now_s)

    def _received(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        """A worker has one of the answers that go in turn."""
        if not self._answering.window.answered(message.sender, now_s):
            raise WireError(f"refused word from worker {message.sender} of an answer that it was not sent")
        return self._answering.next_in_turn(now_s)

    def _pull(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        for index, part in self._all_parts:
            payload = self._answering.give(client, index, part)
            if not client.is_beside:
                yield Send(message.sender, with_tensors(self.message(Kind.ANSWER), index, part, payload))
        if client.is_beside:
            yield Send(message.sender, self.message(Kind.ANSWER, tensor_bytes=self._answering.range_bytes))

    def _leave(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        """It may still pull: its memory stays known. Nothing waits for it any more."""
        client.answers.clear()
        self._answering.window.forget(message.sender)
        self._tables.leave(message.sender)
        for index, part in self._all_parts:
            yield from self._answering.answer(index, part, part.shard.leave(message.sender), now_s)
        yield from self._answering.next_in_turn(now_s)
        yield Send(message.sender, self.message(Kind.OK))

    def _step_aside(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        for index, part in self._all_parts:
            yield from self._answering.answer(index, part, part.shard.step_aside(message.sender), now_s)
        yield Send(message.sender, self.message(Kind.OK))

    def _come_back(self, client: Client, message: Message, now_s: float) -> Iterator[Action]:
        for part in self.parts:
            part.shard.come_back(message.sender)
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
        yield Send(message.sender, self.message(kind, clock=clock, **self._tables.receive(message)))

    def _parts_of(self, message: Message) -> list[tuple[int, Part]]:
        """The shards that a message is about, with their indices. Raises WireError if there is no such shard."""
        if message.shard == ALL_SHARDS:
            return self._all_parts
        if not 0 <= message.shard < len(self.parts):
            raise WireError(f"server {self.index} has {len(self.parts)} shards, and none of index {message.shard}")
        return [(message.shard, self.parts[message.shard])]
