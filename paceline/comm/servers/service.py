"""A server's loop: its core behind a socket and lines. Tensors of workers on this host stay in shared memory."""

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, final

import zmq

from paceline.comm.servers.lending import Lending, can_lend
from paceline.comm.servers.line import LINE_BYTES, Bell, BellAddress, ServerLine
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.comm.wire import Keys, Listener
from paceline.errors import PacelineError
from paceline.messages import Kind, Message, Raw, WireError
from paceline.records import Reporter, UpdateRecord
from paceline.server.server_core import Send, ServerCore, Updated
from paceline.server.shard import Applied
from paceline.server.spec import ServerSpec

POLL_S = 0.1


@dataclass
class _Neighbour:
    """A worker on this host, as this server reaches it."""

    line: ServerLine
    segments: tuple[SharedBlock, ...]
    gradients: Sequence[int]
    """Their address."""
    asked_on_line: bool = False
    """Whether the last request came that way; its answer goes back the same."""

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
        self.line.close()


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
        self._reporter = reporter
        self._core = ServerCore(index=index, epoch=epoch)
        self._neighbours: dict[bytes, _Neighbour] = {}  # by identity
        self._spec: ServerSpec | None = None
        self._shared: SharedBlock | None = None
        self._lending: Lending | None = None
        self._is_stopping = False

    @property
    def bell(self) -> BellAddress:
        """What workers on this host ring after a request on their line."""
        return self._bell.address

    @property
    def iteration(self) -> int:
        return max(self._core.iteration, self._lending.iteration if self._lending is not None else 0)

    def configure(self, spec: ServerSpec) -> None:
        """Build the shards; called once, before any worker attaches. Raises UsageError for an unfit aggregator."""
        num_bytes = spec.layout.num_bytes
        if spec.rule.torn_reads:
            self._shared = SharedBlock.create(num_bytes)
        if can_lend(spec):
            self._lending = Lending(spec)
        self._core.configure(spec, memory=self._shared.tensor[:num_bytes] if self._shared is not None else None)
        self._spec = spec

    def serve(self) -> None:
        """Answer requests until `stop` is called. Raises what an update raised; then nothing is served any more."""
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
                if self._lending is not None:
                    self._report(self._lending.look())
        finally:
            self._close()

    def stop(self) -> None:
        self._is_stopping = True

    def _close(self) -> None:
        self._listener.close()
        self._bell.close()
        self._core.close()
        for neighbour in self._neighbours.values():
            neighbour.close()
        if self._shared is not None:
            self._shared.close()
        if self._lending is not None:
            self._lending.close()

    def _handle_lines(self) -> None:
        """Answer every request on a line; one that comes meanwhile rings again."""
        self._bell.silence()
        for identity, neighbour in list(self._neighbours.items()):
            frames = neighbour.line.receive()
            if frames is not None:
                neighbour.asked_on_line = True
                self._handle(identity, frames)

    def _handle_socket(self) -> None:
        identity, *frames = self._listener.socket.recv_multipart(copy=False)
        if identity.bytes in self._neighbours:
            self._neighbours[identity.bytes].asked_on_line = False
        self._handle(identity.bytes, frames)

    def _handle(self, identity: bytes, frames: Sequence[Raw]) -> None:
        """Answer one request, and whoever it completes; trouble with it is the asker's."""
        try:
            message = Message.decode(frames, epoch=self._core.epoch)
            if identity != identity_of(message.sender):
                raise WireError(f"refused a message for worker {message.sender} from {identity!r}")
            if self._lending is not None:
                self._report(self._lending.take_back(self._core.parts))
            if message.kind is Kind.ATTACH:
                self._attach(message)
                return
        except PacelineError as error:
            self._send(identity, self._core.failure(error))
            return
        records: list[UpdateRecord] = []
        for action in self._core.receive(message, time.perf_counter()):
            if isinstance(action, Send):
                self._send(identity_of(action.to), action.message)
            elif isinstance(action, Updated):
                records += action.records
            else:
                os.sched_yield()  # to the thread that sends: a worker beside, which wakes next, may take its core
        for record in records:
            self._reporter.emit(record)
        is_plain = message.kind is Kind.EXCHANGE and not message.flags and not message.body
        if self._lending is not None and is_plain and self._core.is_quiet:
            gradients = [self._neighbours[identity_of(rank)].gradients for rank in range(len(self._neighbours))]
            self._lending.lend(self._core.parts, gradients)

    def _report(self, applied: Sequence[Applied]) -> None:
        for one in applied:
            self._reporter.emit(UpdateRecord(self._core.index, one.iteration, one.worker, one.clock, one.staleness))

    def _send(self, identity: bytes, message: Message) -> None:
        neighbour = self._neighbours.get(identity)
        if neighbour is not None and neighbour.asked_on_line:
            neighbour.line.send(message.encode_head())
        else:
            self._listener.send(identity, message)

    def _attach(self, message: Message) -> None:
        """Open the memory of a worker on this host, in place of what it had before."""
        identity = identity_of(message.sender)
        if identity in self._neighbours:
            self._neighbours.pop(identity).close()
        if self._spec is None or not message.body:
            about = self._core.attach(message, gradients=None, parameters=None, is_beside=False)
        else:
            num_bytes = self._spec.layout.num_bytes
            gradients, parameters = (
                SharedBlock.open(_address(message.body.get(name), least_bytes=num_bytes))
                for name in ("gradients", "parameters")
            )
            line = ServerLine(_address(message.body.get("line"), least_bytes=LINE_BYTES))
            self._neighbours[identity] = _Neighbour(line, (gradients, parameters), astuple(gradients.address))
            about = self._core.attach(
                message,
                gradients=gradients.tensor[:num_bytes],
                parameters=parameters.tensor[:num_bytes],
                is_beside=True,
            )
            if self._shared is not None:
                about["parameters"] = astuple(self._shared.address)
            if self._lending is not None:
                about["loan"] = astuple(self._lending.address)
        self._listener.send(identity, self._core.message(Kind.OK, body=about))


def _address(numbers: Any, *, least_bytes: int) -> BlockAddress:
    """Raises WireError if these are not the numbers of a segment of at least that size."""
    is_plain = isinstance(numbers, list) and len(numbers) == 4 and all(type(n) is int and n >= 0 for n in numbers)
    if not is_plain or numbers[2] < least_bytes:
        raise WireError(f"refused {numbers!r} as the address of {least_bytes} bytes of shared memory")
    return BlockAddress(*numbers)


@functools.lru_cache
def identity_of(worker: int) -> bytes:
    """A worker's name on a server's socket."""
    return f"worker-{worker}".encode()
