"""A server's loop: a shard behind a socket. Tensors of workers on this host stay in shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import safetensors.torch
import torch
import zmq
from torch import Tensor

from paceline.comm.base import OptimizerSpec
from paceline.comm.line import Bell, BellAddress, ServerLine
from paceline.comm.segment import Segment, SegmentAddress
from paceline.comm.wire import Keys, Kind, Listener, Message, Raw, WireError, from_frames, raw_bytes, to_frames
from paceline.errors import PacelineError
from paceline.layout import Layout
from paceline.records import Reporter, UpdateRecord
from paceline.server.admission import AdmissionRule
from paceline.server.ranges import KeyRange
from paceline.server.shard import Answer, Shard, build_optimizer
from paceline.server.state import export_state, import_state

VOID, STOP, ADMITTED = 1, 2, 4  # flags of EXCHANGE and ANSWER
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
    """One worker, as this server reaches it: tensors to read gradients from and to write parameters to."""

    identity: bytes
    parameters: list[Tensor]
    gradients: list[Tensor]
    segments: tuple[Segment, ...]
    """Mapped memory of a worker on this host; none for a worker elsewhere, whose tensors cross the wire."""
    line: ServerLine | None = None
    """The quick way to a worker on this host."""
    asked_on_line: bool = False
    """Whether the last request came that way; its answer goes back the same."""
    arrived_s: float = 0.0

    @property
    def is_local(self) -> bool:
        return bool(self.segments)


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
        self._shard: Shard | None = None
        self._spec: ServerSpec | None = None
        self._groups: list[int] = []
        self._handlers: dict[Kind, Callable[[_Client, Message], None]] = {
            Kind.INITIALISE: self._initialise,
            Kind.EXCHANGE: self._exchange,
            Kind.WAIT: self._wait,
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
        return self._shard.iteration if self._shard is not None else 0

    def configure(self, spec: ServerSpec) -> None:
        """Build the shard; called once, from any thread, before the first worker attaches."""
        segments = spec.layout.segments
        parameters = [
            torch.zeros(
                piece.stop - piece.start if piece.shape is None else piece.shape, dtype=segments[piece.segment].dtype
            )
            for piece in spec.pieces
        ]
        owned: dict[int, list[Tensor]] = {}
        for piece, parameter in zip(spec.pieces, parameters, strict=True):
            owned.setdefault(segments[piece.segment].group, []).append(parameter)
        self._groups = sorted(owned)
        optimizer = build_optimizer(
            spec.optimizer.optimizer_class,
            spec.optimizer.defaults,
            [spec.optimizer.groups[group] for group in self._groups],
            [owned[group] for group in self._groups],
        )
        self._spec = spec
        self._shard = Shard(parameters=parameters, optimizer=optimizer, rule=spec.rule, max_updates=spec.max_updates)

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
            client.parameters.clear()
            client.gradients.clear()
            for segment in client.segments:
                segment.close()
            if client.line is not None:
                client.line.close()

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
        except (PacelineError, ValueError, TypeError) as error:
            text = f"server {self._index}: {type(error).__name__}: {error}"[:_ERROR_LENGTH]
            failure = self._message(Kind.ERROR, body={"error": text})
            client = next((c for c in self._clients.values() if c.identity == identity), None)
            if client is None:
                self._listener.send(identity, failure)
            else:
                self._send(client, failure)

    def _send(self, client: _Client, message: Message) -> None:
        if client.line is not None and client.asked_on_line:
            client.line.send(message.encode_head())
        else:
            self._listener.send(client.identity, message)

    def _attach(self, identity: bytes, message: Message) -> None:
        spec, shard = self._ready()
        if message.body:
            segments = tuple(Segment.open(SegmentAddress(*message.body[name])) for name in ("parameters", "gradients"))
            parameters, gradients = (
                [piece.view(spec.layout, segment.tensor[: spec.layout.num_bytes]) for piece in spec.pieces]
                for segment in segments
            )
            line = ServerLine(SegmentAddress(*message.body["line"]))
            client = _Client(identity, parameters, gradients, segments, line)
        else:
            gradients = [torch.zeros_like(parameter) for parameter in shard.parameters]
            client = _Client(identity, shard.parameters, gradients, ())
        self._clients[message.sender] = client
        self._listener.send(identity, self._message(Kind.OK))

    def _initialise(self, client: _Client, message: Message) -> None:
        _, shard = self._ready()
        if client.is_local:
            for parameter, given in zip(shard.parameters, client.parameters, strict=True):
                parameter.copy_(given)
        else:
            from_frames(message.payload, shard.parameters)
        shard.iteration = message.iteration
        for worker in self._clients:
            shard.pulled(worker)
        self._send(client, self._message(Kind.OK))

    def _exchange(self, client: _Client, message: Message) -> None:
        _, shard = self._ready()
        client.arrived_s = time.perf_counter()
        is_void = bool(message.flags & VOID)
        if not client.is_local and not is_void:
            from_frames(message.payload, client.gradients)
        given = message.body.get("groups")
        groups = [_tuples(given[group]) for group in self._groups] if given is not None else None
        answers = shard.push(
            message.sender,
            message.clock,
            None if is_void else client.gradients,
            pause_at=message.pause_at,
            stop=bool(message.flags & STOP),
            groups=groups,
        )
        self._answer(answers, released_at_s=client.arrived_s)

    def _wait(self, client: _Client, message: Message) -> None:
        _, shard = self._ready()
        client.arrived_s = time.perf_counter()
        self._answer(shard.wait(message.sender, pause_at=message.pause_at), released_at_s=client.arrived_s)

    def _leave(self, client: _Client, message: Message) -> None:
        _, shard = self._ready()
        now_s = time.perf_counter()
        self._answer(shard.leave(message.sender), released_at_s=now_s)
        self._send(client, self._message(Kind.OK))

    def _pull(self, client: _Client, message: Message) -> None:
        self._send_parameters(client, message.sender, self._message(Kind.ANSWER))

    def _get_state(self, client: _Client, message: Message) -> None:
        _, shard = self._ready()
        raw = memoryview(safetensors.torch.save(export_state(shard.optimizer, shard.parameters)))
        self._listener.send(client.identity, self._message(Kind.OK, payload=[raw]))

    def _set_state(self, client: _Client, message: Message) -> None:
        _, shard = self._ready()
        raw = b"".join(raw_bytes(frame) for frame in message.payload)
        import_state(shard.optimizer, shard.parameters, safetensors.torch.load(raw))
        self._send(client, self._message(Kind.OK))

    def _answer(self, answers: Sequence[Answer], *, released_at_s: float) -> None:
        """Send the current parameters to every worker that is complete.

        Args:
            released_at_s: when the request arrived that completed them; until then they waited for others.
        """
        _, shard = self._ready()
        for answer in answers:
            client = self._clients[answer.worker]
            message = Message(
                Kind.ANSWER,
                self._epoch,
                sender=self._index,
                flags=(STOP if answer.stop else 0) | (ADMITTED if answer.admitted else 0),
                clock=answer.clock,
                iteration=answer.iteration,
                staleness=answer.staleness,
                waiting_s=max(0.0, released_at_s - client.arrived_s),
            )
            self._send_parameters(client, answer.worker, message)
        for applied in shard.drain_applied():
            self._reporter.emit(
                UpdateRecord(self._index, applied.iteration, applied.worker, applied.clock, applied.staleness)
            )

    def _send_parameters(self, client: _Client, worker: int, message: Message) -> None:
        _, shard = self._ready()
        if client.is_local:
            for target, parameter in zip(client.parameters, shard.parameters, strict=True):
                target.copy_(parameter)
        else:
            # The socket reads the frames after this returns and the next update writes in place: give it a copy.
            message = replace(message, payload=[bytes(frame) for frame in to_frames(shard.parameters)])
        shard.pulled(worker)
        self._send(client, message)

    def _message(self, kind: Kind, **fields: Any) -> Message:
        return Message(kind, self._epoch, sender=self._index, iteration=self.iteration, **fields)

    def _ready(self) -> tuple[ServerSpec, Shard]:
        if self._spec is None or self._shard is None:
            raise WireError(f"server {self._index} was asked before it was configured")
        return self._spec, self._shard


def identity_of(worker: int) -> bytes:
    """A worker's name on a server's socket."""
    return f"worker-{worker}".encode()


def _tuples(group: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where optimizers have tuples (betas)."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}
