"""A worker's end of the parameter servers: one request to each server, answered when the worker may go on."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, final

import safetensors.torch
import zmq
from torch import Tensor

from paceline.comm.base import Collective, OptimizerSpec, Push, Reply, Store, Timing
from paceline.comm.servers.line import BellAddress, WorkerLine
from paceline.comm.servers.send_window import PIECES_UNDER_WAY, SendWindow
from paceline.comm.servers.service import identity_of
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.comm.wire import (
    ADMITTED,
    APART,
    FRAME_BYTES,
    IN_TURN,
    STOP,
    VOID,
    Caller,
    Keys,
    Kind,
    Message,
    Raw,
    WireError,
    from_frames,
    raw_bytes,
    to_frames,
)
from paceline.errors import Aborted, DeadlineExceeded
from paceline.layout import Layout
from paceline.server.ranges import KeyRange, cut, in_shards
from paceline.server.state import join, split

_ON_LINE = frozenset({Kind.INITIALISE, Kind.EXCHANGE, Kind.WAIT, Kind.PULL, Kind.LEAVE})
# A waiting worker first offers its core, where the server then runs without being woken on another. Conv net, two
# workers and a server on two cores, medians of three: ps-bsp 42,000 samples/s sleeping at once, 50,000 so; ps-asp
# 50,000 and 55,000. With more workers than cores they sleep at once, for others can use the core.
_YIELD_S = 1e-3
WAKE_S = 0.2  # how often a wait looks whether the run was aborted
_GLANCE_S = 2e-3  # how often it looks at the lines, where servers elsewhere wait for what one here decides


@dataclass(frozen=True)
class ServerAddress:
    """Where a server listens, and, if it runs on this worker's host, its bell."""

    endpoint: str
    bell: BellAddress | None

    @property
    def is_local(self) -> bool:
        return self.bell is not None


Configure = Callable[[Layout, OptimizerSpec, Sequence[KeyRange]], None]
_TENSORS = frozenset({Kind.EXCHANGE, Kind.WAIT, Kind.PULL})  # answered with parameters


@dataclass
class _Link:
    """One server, as this worker reaches it."""

    caller: Caller
    line: WorkerLine | None
    """The quick way to a server on this host."""
    parameters: list[list[Tensor]] = field(default_factory=list)
    """This worker's, for each of the server's shards."""
    gradients: list[list[Tensor]] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    """The server's own parameters, if this worker is to read them itself."""
    follows: bool = False
    """Whether it has to be told what the first server decided."""
    is_in_turn: bool = False
    """Whether pieces are to go a few at a time."""
    window: SendWindow[Message] = field(default_factory=lambda: SendWindow(limit_bytes=math.inf))
    """What it has yet to be asked."""
    num_due: int = 0
    """Answers to come."""
    asked_over: WorkerLine | Caller | None = None
    """Where its answers will come from; none if it has not been asked yet."""

    @property
    def is_local(self) -> bool:
        return self.line is not None


Take = Callable[[_Link, Message], None]


@final
class ServerGroup(Store):
    """Speaks to every server at once.

    Args:
        keys: of the run.
        servers: in the order of their key ranges.
        collective: of the workers, for the hand-over at the start.
        configure: has every server build its shards; called by rank 0.
        epoch: membership epoch.
        deadline_s: how long servers may all be silent while an answer is due; none: for ever.
    """

    def __init__(
        self,
        keys: Keys,
        *,
        servers: Sequence[ServerAddress],
        collective: Collective,
        configure: Configure,
        epoch: int,
        deadline_s: float | None,
    ) -> None:
        self.timing = Timing()
        self._collective, self._configure = collective, configure
        self._epoch, self._deadline_s = epoch, deadline_s
        identity = identity_of(collective.rank).decode()
        yield_s = _YIELD_S if collective.size <= len(os.sched_getaffinity(0)) else 0.0
        self._links = [
            _Link(
                Caller(keys, endpoint=server.endpoint, identity=identity),
                WorkerLine(server.bell, yield_s=yield_s) if server.bell is not None else None,
            )
            for server in servers
        ]
        self._poller = zmq.Poller()
        for link in self._links:
            self._poller.register(link.caller.socket, zmq.POLLIN)
        self._segments: list[SharedBlock] = []
        self._abort_reason: str | None = None
        self._look_s = WAKE_S  # how often a wait for servers elsewhere looks at the lines too
        self._ranges: list[KeyRange] = []
        self._layout: Layout | None = None
        self._num_bytes = 0
        self._clock = 0

    def allocate(self, num_bytes: int) -> Tensor:
        segment = SharedBlock.create(num_bytes)
        self._segments.append(segment)
        return segment.tensor[:num_bytes]

    def attach(self, layout: Layout, spec: OptimizerSpec, parameters: Tensor, gradients: Tensor) -> None:
        self._layout = layout
        is_whole = not spec.element_wise
        # Between hosts a piece is updated, and sent back, while the next one arrives; on one host nothing is gained.
        is_remote = any(self._collective.all_gather_object(not all(link.is_local for link in self._links)))
        piece_bytes = FRAME_BYTES if is_remote else None
        self._ranges = cut(layout, num_servers=len(self._links), whole_tensors=is_whole, piece_bytes=piece_bytes)
        self._num_bytes = layout.num_bytes
        if self._collective.rank == 0:
            self._configure(layout, spec, self._ranges)
        self._collective.barrier()
        memory = {"parameters": self._address_of(parameters), "gradients": self._address_of(gradients)}
        flags = 0 if any(link.is_local for link in self._links) else APART
        requests = []
        for link, pieces in zip(self._links, self._ranges, strict=True):
            shards = in_shards(pieces, whole=is_whole)
            link.parameters = [[piece.view(layout, parameters) for piece in shard] for shard in shards]
            link.gradients = [[piece.view(layout, gradients) for piece in shard] for shard in shards]
            body = memory | {"line": astuple(link.line.address)} if link.line is not None else {}
            requests.append([self._message(Kind.ATTACH, flags=flags, body=body)])
        self._ask("attach", requests, self._attached_to)
        self._look_s = _GLANCE_S if any(link.follows for link in self._links) else WAKE_S
        self._collective.barrier()
        self._initialise(iteration=0)

    def exchange(self, push: Push) -> Reply:
        body = {} if push.groups is None else {"groups": [dict(group) for group in push.groups]}
        flags = (VOID if push.void else 0) | (STOP if push.stop else 0)
        moved_bytes = (1 if push.void else 2) * self._num_bytes
        whole = self._message(Kind.EXCHANGE, flags=flags, clock=self._clock, pause_at=push.pause_at, body=body)

        def first(link: _Link) -> list[Message]:
            if link.is_local:
                return [] if link.follows else [whole]
            return [whole] if push.void else _in_shards(whole, link.gradients)

        def follow_up(link: _Link, decided: Message) -> Message:
            """What a server is told of the first one's decision; on a line, with the push, as it takes one request."""
            decision = {"contributors": decided.body["contributors"], "goes_on_at": decided.clock}
            if link.is_local:
                return replace(whole, body={**body, **decision})
            return self._message(Kind.FOLLOW, body=decision)

        def take(link: _Link, answer: Message) -> None:
            self._take(link, answer)
            if "contributors" in answer.body:
                for other in self._links:
                    if other.follows:
                        self._send(other, follow_up(other, answer))

        return self._receive(
            f"exchange of clock {self._clock}", [first(link) for link in self._links], take, moved_bytes=moved_bytes
        )

    def wait_for_admission(self, *, pause_at: int) -> Reply:
        requests = [[self._message(Kind.WAIT, pause_at=pause_at)] for _ in self._links]
        return self._receive("admission", requests, self._take, moved_bytes=self._num_bytes)

    def pull(self) -> int:
        answers = self._ask("pull", [[self._message(Kind.PULL)] for _ in self._links], self._take)
        return answers[0][-1].iteration

    def leave(self) -> None:
        self._ask("leave", [[self._message(Kind.LEAVE)] for _ in self._links])

    def optimizer_state(self) -> dict[str, Tensor]:
        answers = self._ask("optimizer state", [[self._message(Kind.GET_STATE)] for _ in self._links])
        parts = [safetensors.torch.load(_joined(answer)) for (answer,) in answers]
        return join(self._require_layout(), self._ranges, parts)

    def load_state(self, state: Mapping[str, Tensor], *, iteration: int) -> None:
        if self._collective.rank == 0:
            parts = split(self._require_layout(), self._ranges, state)
            payloads = [memoryview(safetensors.torch.save(part)) for part in parts]
            self._ask("optimizer state", [[self._message(Kind.SET_STATE, payload=[raw])] for raw in payloads])
        self._initialise(iteration=iteration)

    def abort(self, reason: str) -> None:
        self._abort_reason = reason

    def close(self) -> None:
        for link in self._links:
            link.caller.close()
            link.parameters, link.gradients, link.sources = [], [], []
            if link.line is not None:
                link.line.close()
        self._links.clear()
        for segment in self._segments:
            segment.close()
        self._segments.clear()

    def _attached_to(self, link: _Link, answer: Message) -> None:
        link.follows, link.is_in_turn = bool(answer.body["follows"]), bool(answer.body["is_in_turn"])
        if "parameters" in answer.body:
            segment = SharedBlock.open(BlockAddress(*answer.body["parameters"]))
            self._segments.append(segment)
            layout = self._require_layout()
            pieces = self._ranges[self._links.index(link)]
            link.sources = [piece.view(layout, segment.tensor[: layout.num_bytes]) for piece in pieces]

    def _initialise(self, *, iteration: int) -> None:
        """Rank 0 gives the servers its parameters; nobody goes on before they have them."""
        if self._collective.rank == 0:
            whole = self._message(Kind.INITIALISE, iteration=iteration)
            requests = [[whole] if link.is_local else _in_shards(whole, link.parameters) for link in self._links]
            self._ask("initial parameters", requests)
        self._collective.barrier()

    def _receive(self, what: str, requests: Sequence[Sequence[Message]], take: Take, *, moved_bytes: int) -> Reply:
        """Ask, and account the time."""
        began_s = time.perf_counter()
        answers = self._ask(what, requests, take)
        elapsed_s = time.perf_counter() - began_s
        waiting_s = min(elapsed_s, max(sum(answer.waiting_s for answer in some) for some in answers))
        self.timing.waiting_s += waiting_s
        self.timing.communication_s += elapsed_s - waiting_s
        self.timing.moved_bytes += moved_bytes
        # Of many shards the first server's last one decides, and speaks for all.
        heads = [max(some, key=lambda answer: answer.shard) for some in answers]
        self._clock = heads[0].clock
        return Reply(
            iteration=heads[0].iteration,
            staleness=tuple(head.staleness for head in heads),
            stop=bool(heads[0].flags & STOP),
            admitted=all(answer.flags & ADMITTED for some in answers for answer in some),
        )

    def _take(self, link: _Link, answer: Message) -> None:
        """Have a server's, or one of its shards', parameters in place; a local server has written them itself."""
        if not link.is_local:
            from_frames(answer.payload, link.parameters[answer.shard])
        elif link.sources:
            targets = (target for shard in link.parameters for target in shard)
            for source, target in zip(link.sources, targets, strict=True):
                target.copy_(source)

    def _ask(self, what: str, requests: Sequence[Sequence[Message]], take: Take | None = None) -> list[list[Message]]:
        """Ask each server, and wait for all it has to answer: to a request for tensors, one message a shard.

        Of pushed pieces only a few go out before the first is answered, where updates need every worker's.

        Args:
            take: is given every answer as it comes.

        Raises:
            DeadlineExceeded, Aborted, WireError: naming the server and what was asked.
        """
        for link, messages in zip(self._links, requests, strict=True):
            is_cut = bool(messages) and messages[0].kind in _TENSORS and not link.is_local
            link.num_due = len(link.parameters) if is_cut else 1
            link.asked_over = None
            is_in_turn = is_cut and link.is_in_turn
            link.window = SendWindow(limit_bytes=PIECES_UNDER_WAY * FRAME_BYTES if is_in_turn else math.inf)
            for message in messages:
                link.window.put(message, sum(len(frame) for frame in message.payload))
            self._send_next(link)
        answers: list[list[Message]] = [[] for _ in self._links]
        heard_s = time.monotonic()
        while any(link.num_due for link in self._links):
            if self._abort_reason is not None:
                raise Aborted(f"{what} on rank {self._collective.rank} was ended: {self._abort_reason}")
            for index, frames in self._receive_some():
                answer = Message.decode(frames, epoch=self._epoch)
                if answer.kind is Kind.ERROR:
                    raise WireError(f"{what} was refused by {answer.body.get('error')}")
                link = self._links[index]
                link.num_due -= 1
                if answer.flags & IN_TURN:
                    self._send(link, self._message(Kind.RECEIVED))
                answers[index].append(answer)
                link.window.answered()
                self._send_next(link)
                heard_s = time.monotonic()
                if take is not None:
                    take(link, answer)
            if self._deadline_s is not None and time.monotonic() > heard_s + self._deadline_s:
                silent = [index for index, link in enumerate(self._links) if link.num_due]
                raise DeadlineExceeded(
                    f"rank {self._collective.rank}: server(s) {silent} did not answer within {self._deadline_s:g} s "
                    f"to: {what}"
                )
        return answers

    def _send_next(self, link: _Link) -> None:
        """What may go now."""
        for request in link.window.take():
            self._send(link, request)

    def _send(self, link: _Link, request: Message) -> None:
        """Ask one server, on its line if it has one and the request fits."""
        if link.line is not None and request.kind in _ON_LINE and link.line.send(request.encode_head()):
            link.asked_over = link.line
        else:
            link.caller.send(request)
            link.asked_over = link.caller

    def _receive_some(self) -> list[tuple[int, Sequence[Raw]]]:
        """Wait a while for those of the servers that owe an answer, and take what has come."""
        due = [(index, link.asked_over) for index, link in enumerate(self._links) if link.num_due]
        is_mixed = any(isinstance(way, Caller) for _, way in due)
        wait_s = WAKE_S
        for index, way in due:
            if isinstance(way, WorkerLine):
                frames = way.receive(timeout_s=0.0 if is_mixed else WAKE_S)
                if frames is not None or not is_mixed:
                    return [] if frames is None else [(index, frames)]
                wait_s = self._look_s
        ready = {socket for socket, _ in self._poller.poll(int(wait_s * 1000))}
        return [
            (index, link.caller.socket.recv_multipart(copy=False))
            for index, link in enumerate(self._links)
            if link.caller.socket in ready
        ]

    def _message(self, kind: Kind, **fields: Any) -> Message:
        return Message(kind, self._epoch, sender=self._collective.rank, **fields)

    def _require_layout(self) -> Layout:
        if self._layout is None:
            raise WireError("the servers have not been attached yet")
        return self._layout

    def _address_of(self, tensor: Tensor) -> tuple[int, ...]:
        segment = next(s for s in self._segments if s.tensor.data_ptr() == tensor.data_ptr())
        return astuple(segment.address)


def _joined(message: Message) -> bytes:
    return b"".join(raw_bytes(frame) for frame in message.payload)


def _in_shards(whole: Message, tensors: Sequence[Sequence[Tensor]]) -> list[Message]:
    """The message with the tensors of each shard; the first layers', which the next forward pass needs first, ahead."""
    return [replace(whole, shard=index, payload=to_frames(some)) for index, some in enumerate(tensors)]
