"""A server's loop: a shard behind a socket. Tensors of workers on this host stay in shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, final

import safetensors.torch
import torch
import zmq
from safetensors import SafetensorError
from torch import Tensor

from paceline.comm.base import OptimizerSpec
from paceline.comm.servers.answers import AnswersElsewhere
from paceline.comm.servers.line import Bell, BellAddress, ServerLine
from paceline.comm.servers.part import Part, are_in_turn, build_part
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.comm.wire import (
    ADMITTED,
    ALL_SHARDS,
    APART,
    STOP,
    VOID,
    Keys,
    Kind,
    Listener,
    Message,
    Raw,
    WireError,
    from_frames,
    raw_bytes,
)
from paceline.errors import PacelineError
from paceline.layout import Layout
from paceline.records import Reporter, UpdateRecord
from paceline.server.admission import AdmissionRule
from paceline.server.ranges import KeyRange, in_shards
from paceline.server.shard import Answer
from paceline.server.state import export_state, import_state

POLL_S = 0.1
_ERROR_LENGTH = 4000


@dataclass(frozen=True)
class ServerSpec:
    """What one server is to own."""

    layout: Layout
    pieces: KeyRange
    optimizer: OptimizerSpec
    rule: AdmissionRule
    max_updates: int | None


@dataclass
class _Client:
    """One worker, as this server reaches it."""

    identity: bytes
    gradients: list[list[Tensor]]
    """For each shard; of a worker on this host where it computes them, else where they are put as they arrive."""
    parameters: list[list[Tensor]] | None = None
    """For each shard, the memory of a worker on this host to write to; none for a worker elsewhere."""
    segments: tuple[SharedBlock, ...] = ()
    line: ServerLine | None = None
    """The quick way to a worker on this host."""
    asked_on_line: bool = False
    """Whether the last request came that way; its answer goes back the same."""
    arrived_s: float = 0.0
    """When its last request did."""
    released_s: float = 0.0
    """Of a worker elsewhere, when a shard last stopped to hold an answer back."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """For a worker on this host, which is answered once for all shards: what they have answered to its request yet."""


@final
class ParameterService:
    """Serves one key range to the workers of a run until `stop`.

    Args:
        keys: of the run.
        host: the address to listen on.
        index: which server of the group this is.
        epoch: membership epoch; requests of another one are refused.
        reporter: gets a record for every gradient applied.
    """

    def __init__(self, keys: Keys, *, host: str, index: int, epoch: int, reporter: Reporter) -> None:
        self._listener = Listener(keys, host=host)
        self.endpoint = self._listener.endpoint
        self._bell = Bell()
        self._index, self._epoch, self._reporter = index, epoch, reporter
        self._clients: dict[int, _Client] = {}
        self._is_stopping = False
        self._spec: ServerSpec | None = None
        self._parts: list[Part] = []
        self._all_parts: list[tuple[int, Part]] = []
        self._elsewhere = AnswersElsewhere(self._send_to)
        self._shared: SharedBlock | None = None
        self._handlers: dict[Kind, Callable[[_Client, Message], None]] = {
            Kind.INITIALISE: self._initialise,
            Kind.EXCHANGE: self._exchange,
            Kind.FOLLOW: self._follow,
            Kind.WAIT: self._wait,
            Kind.RECEIVED: self._received,
            Kind.PULL: self._pull,
            Kind.LEAVE: self._leave,
            Kind.GET_STATE: self._get_state,
            Kind.SET_STATE: self._set_state,
        }

    @property
    def bell(self) -> BellAddress:
        """What workers on this host ring after a request on their line."""
        return self._bell.address

    @property
    def iteration(self) -> int:
        return self._parts[-1].shard.iteration if self._parts else 0

    def configure(self, spec: ServerSpec) -> None:
        """Build the shards; called once, from any thread, before the first worker attaches.

        The first server's last shard decides where shards must agree: it has heard of a gradient when all of it came.
        """
        memory: Tensor | None = None
        if spec.rule.torn_reads:
            self._shared = SharedBlock.create(spec.layout.num_bytes)
            memory = self._shared.tensor[: spec.layout.num_bytes]
        ranges = in_shards(spec.pieces, whole=not spec.optimizer.element_wise)
        rules = [spec.rule.for_another_shard() for _ in ranges]
        if self._index == 0:
            rules[-1] = spec.rule
        self._parts = [
            build_part(spec.layout, pieces, spec.optimizer, rule, max_updates=spec.max_updates, memory=memory)
            for pieces, rule in zip(ranges, rules, strict=True)
        ]
        self._all_parts = list(enumerate(self._parts))
        self._elsewhere.are_in_turn = are_in_turn(self._parts)
        self._spec = spec

    def serve(self) -> None:
        """Answer requests until `stop` is called."""
        poller = zmq.Poller()
        poller.register(self._listener.socket, zmq.POLLIN)
        poller.register(self._bell.fd, zmq.POLLIN)
        try:
            while not self._is_stopping:
                for source, _ in poller.poll(int(POLL_S * 1000)):
                    if source == self._bell.fd:
                        self._handle_lines()
                    else:
                        self._handle_socket()
        finally:
            self._close()

    def stop(self) -> None:
        self._is_stopping = True

    def _close(self) -> None:
        self._listener.close()
        self._bell.close()
        for client in self._clients.values():
            client.parameters, client.gradients = None, []
            for segment in client.segments:
                segment.close()
            if client.line is not None:
                client.line.close()
        self._parts, self._all_parts = [], []
        if self._shared is not None:
            self._shared.close()

    def _handle_lines(self) -> None:
        """Answer every request on a line; one that comes meanwhile rings again."""
        self._bell.silence()
        for client in list(self._clients.values()):
            frames = client.line.receive() if client.line is not None else None
            if frames is not None:
                client.asked_on_line = True
                self._handle(client.identity, frames)

    def _handle_socket(self) -> None:
        identity, *frames = self._listener.socket.recv_multipart(copy=False)
        client = next((c for c in self._clients.values() if c.identity == identity.bytes), None)
        if client is not None:
            client.asked_on_line = False
        self._handle(identity.bytes, frames)

    def _handle(self, identity: bytes, frames: Sequence[Raw]) -> None:
        """Answer one request, and whoever it completes; trouble with it is the asker's."""
        try:
            message = Message.decode(frames, epoch=self._epoch)
            if identity != identity_of(message.sender):
                raise WireError(f"refused a message for worker {message.sender} from {identity!r}")
            if message.kind is Kind.ATTACH:
                self._attach(identity, message)
                return
            if message.sender not in self._clients or message.kind not in self._handlers:
                raise WireError(f"refused {message.kind.name} from worker {message.sender}")
            self._handlers[message.kind](self._clients[message.sender], message)
        except (PacelineError, LookupError, ValueError, TypeError) as error:
            text = f"server {self._index}: {type(error).__name__}: {error}"[:_ERROR_LENGTH]
            failure = self._message(Kind.ERROR, body={"error": text})
            client = next((c for c in self._clients.values() if c.identity == identity), None)
            if client is None:
                self._listener.send(identity, failure)
            else:
                self._send(client, failure)

    def _send_to(self, worker: int, message: Message) -> None:
        self._listener.send(self._clients[worker].identity, message)

    def _send(self, client: _Client, message: Message) -> None:
        if client.line is not None and client.asked_on_line:
            client.line.send(message.encode_head())
        else:
            self._listener.send(client.identity, message)

    def _attach(self, identity: bytes, message: Message) -> None:
        spec = self._ready()
        if message.sender >= spec.rule.num_workers:
            raise WireError(f"refused worker {message.sender} of {spec.rule.num_workers}")
        self._elsewhere.some_are_apart |= bool(message.flags & APART)
        about: dict[str, Any] = {
            "follows": self._parts[-1].shard.follows,
            "is_in_turn": self._elsewhere.are_in_turn,
        }
        if message.body:
            least_bytes = spec.layout.num_bytes
            segments = tuple(
                SharedBlock.open(_address(message.body[name], least_bytes=least_bytes))
                for name in ("parameters", "gradients")
            )
            parameters, gradients = (
                [
                    [piece.view(spec.layout, segment.tensor[: spec.layout.num_bytes]) for piece in part.pieces]
                    for part in self._parts
                ]
                for segment in segments
            )
            line = ServerLine(_address(message.body["line"]))
            client = _Client(identity, gradients, parameters, segments, line)
            self._elsewhere.has_neighbour = True
            if self._shared is not None:
                about["parameters"] = astuple(self._shared.address)
        else:
            gradients = [[torch.zeros_like(tensor) for tensor in part.shard.parameters] for part in self._parts]
            client = _Client(identity, gradients)
        self._clients[message.sender] = client
        self._listener.send(identity, self._message(Kind.OK, body=about))

    def _initialise(self, client: _Client, message: Message) -> None:
        parts = self._parts_of(message)
        for index, part in parts:
            if client.parameters is None:
                from_frames(message.payload, part.shard.parameters)
            else:
                _copy(client.parameters[index], part.shard.parameters)
            part.frames = None
            part.shard.iteration = message.iteration
            for worker in self._clients:
                part.shard.pulled(worker)
        if parts[-1][0] == len(self._parts) - 1:
            self._send(client, self._message(Kind.OK))

    def _exchange(self, client: _Client, message: Message) -> None:
        parts = self._parts_of(message)
        client.arrived_s = time.perf_counter()
        is_void = bool(message.flags & VOID)
        given = message.body.get("groups")
        for index, part in parts:
            if client.parameters is None and not is_void:
                from_frames(message.payload, client.gradients[index])
            answers = part.shard.push(
                message.sender,
                message.clock,
                None if is_void else client.gradients[index],
                pause_at=message.pause_at,
                stop=bool(message.flags & STOP),
                groups=part.own_groups(given) if given is not None else None,
            )
            self._answer(index, answers, released_at_s=client.arrived_s)
        if "contributors" in message.body:
            self._follow(client, message)

    def _follow(self, client: _Client, message: Message) -> None:
        """A worker brings what the first server decided."""
        self._tell_followers(message.sender, message.body["goes_on_at"], message.body["contributors"])

    def _tell_followers(self, worker: int, clock: int, contributors: Sequence[int]) -> None:
        now_s = time.perf_counter()
        for index, part in enumerate(self._parts):
            if part.shard.follows:
                self._answer(index, part.shard.follow(worker, clock, contributors), released_at_s=now_s)

    def _wait(self, client: _Client, message: Message) -> None:
        parts = self._parts_of(message)
        client.arrived_s = time.perf_counter()
        for index, part in parts:
            answers = part.shard.wait(message.sender, pause_at=message.pause_at)
            self._answer(index, answers, released_at_s=client.arrived_s)

    def _leave(self, client: _Client, message: Message) -> None:
        now_s = time.perf_counter()
        for index, part in self._parts_of(message):
            self._answer(index, part.shard.leave(message.sender), released_at_s=now_s)
        self._send(client, self._message(Kind.OK))

    def _pull(self, client: _Client, message: Message) -> None:
        for index, part in self._parts_of(message):
            self._give_parameters(client, message.sender, index)
            if client.parameters is None:
                answer = self._message(Kind.ANSWER, shard=index, payload=part.as_frames())
                self._listener.send(client.identity, answer)
        if client.parameters is not None:
            self._send(client, self._message(Kind.ANSWER))

    def _get_state(self, client: _Client, message: Message) -> None:
        state: dict[str, Tensor] = {}
        first = 0
        for _, part in self._parts_of(message):
            state |= export_state(part.shard.optimizer, part.shard.parameters, first_piece=first)
            first += len(part.pieces)
        raw = memoryview(safetensors.torch.save(state))
        self._listener.send(client.identity, self._message(Kind.OK, payload=[raw]))

    def _set_state(self, client: _Client, message: Message) -> None:
        raw = b"".join(raw_bytes(frame) for frame in message.payload)
        try:
            state = safetensors.torch.load(raw)
        except SafetensorError as error:
            raise WireError(f"refused an optimizer state that cannot be read: {error}") from None
        first = 0
        for _, part in self._parts_of(message):
            import_state(part.shard.optimizer, part.shard.parameters, state, first_piece=first)
            first += len(part.pieces)
        self._send(client, self._message(Kind.OK))

    def _answer(self, index: int, answers: Sequence[Answer], *, released_at_s: float) -> None:
        """Give every worker that is complete the current parameters of this shard, those elsewhere first.

        Args:
            released_at_s: when the request arrived that completed them; until then they waited for others.
        """
        part = self._parts[index]
        elsewhere: list[tuple[_Client, Answer]] = []
        beside: list[tuple[_Client, Answer]] = []
        for answer in answers:
            client = self._clients[answer.worker]
            (elsewhere if client.parameters is None else beside).append((client, answer))
        for client, answer in elsewhere:
            self._give_parameters(client, answer.worker, index)
            waiting_s = _waited_s(client, released_at_s)
            client.released_s = released_at_s
            message = self._about(answer, is_admitted=answer.admitted, waiting_s=waiting_s)
            message.shard, message.payload = index, part.as_frames()
            self._elsewhere.send(answer.worker, message)
        if elsewhere and any(len(client.answers) == len(self._parts) - 1 for client, _ in beside):
            os.sched_yield()  # to the thread that sends: a worker beside, which wakes now, may take its core
        for client, answer in beside:
            self._give_parameters(client, answer.worker, index)
            client.answers[index] = answer
            self._answer_on_line(client, _waited_s(client, released_at_s))
        applied = part.shard.drain_applied()
        if index != len(self._parts) - 1:
            return
        for one in applied:
            self._reporter.emit(UpdateRecord(self._index, one.iteration, one.worker, one.clock, one.staleness))
        for answer in answers:
            if answer.contributors is not None:
                self._tell_followers(answer.worker, answer.clock, answer.contributors)

    def _received(self, client: _Client, message: Message) -> None:
        """A worker has one of the answers that go in turn."""
        if not self._elsewhere.received(message.sender):
            raise WireError(f"refused word from worker {message.sender} of an answer that it was not sent")

    def _answer_on_line(self, client: _Client, waiting_s: float) -> None:
        """One answer for all shards, once the last of them has answered."""
        if len(client.answers) == len(self._parts):
            answers = [client.answers.pop(index) for index in range(len(self._parts))]
            is_admitted = all(answer.admitted for answer in answers)
            self._send(client, self._about(answers[-1], is_admitted=is_admitted, waiting_s=waiting_s))

    def _give_parameters(self, client: _Client, worker: int, index: int) -> None:
        shard = self._parts[index].shard
        if client.parameters is not None and self._shared is None:
            _copy(shard.parameters, client.parameters[index])
        shard.pulled(worker)

    def _about(self, answer: Answer, *, is_admitted: bool, waiting_s: float) -> Message:
        body = {} if answer.contributors is None else {"contributors": answer.contributors}
        return Message(
            Kind.ANSWER,
            self._epoch,
            sender=self._index,
            flags=(STOP if answer.stop else 0) | (ADMITTED if is_admitted else 0),
            clock=answer.clock,
            iteration=answer.iteration,
            staleness=answer.staleness,
            waiting_s=waiting_s,
            body=body,
        )

    def _message(self, kind: Kind, **fields: Any) -> Message:
        return Message(kind, self._epoch, sender=self._index, iteration=self.iteration, **fields)

    def _parts_of(self, message: Message) -> list[tuple[int, Part]]:
        """The shards that a message is about, with their indices.

        Raises:
            WireError: there is no such shard.
        """
        if message.shard == ALL_SHARDS:
            return self._all_parts
        if not 0 <= message.shard < len(self._parts):
            raise WireError(f"server {self._index} has {len(self._parts)} shards, and none of index {message.shard}")
        return [(message.shard, self._parts[message.shard])]

    def _ready(self) -> ServerSpec:
        if self._spec is None:
            raise WireError(f"server {self._index} was asked before it was configured")
        return self._spec


def _address(numbers: Any, *, least_bytes: int = 0) -> BlockAddress:
    """
    Raises:
        WireError: these are not the numbers of a segment of at least that size.
    """
    is_plain = isinstance(numbers, list) and len(numbers) == 3 and all(type(n) is int and n >= 0 for n in numbers)
    if not is_plain or numbers[2] < least_bytes:
        raise WireError(f"refused {numbers!r} as the address of {least_bytes} bytes of shared memory")
    return BlockAddress(*numbers)


def identity_of(worker: int) -> bytes:
    """A worker's name on a server's socket."""
    return f"worker-{worker}".encode()


def _waited_s(client: _Client, released_at_s: float) -> float:
    """Of a request with many pieces from its latest arrival so far, and not twice at the same time."""
    return max(0.0, released_at_s - max(client.arrived_s, client.released_s))


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
