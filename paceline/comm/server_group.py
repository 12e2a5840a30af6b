"""A worker's end of the parameter servers: one request to each server, answered when the worker may go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, final

import safetensors.torch
import zmq
from torch import Tensor

from paceline.comm.base import Collective, OptimizerSpec, Push, Reply, Store, Timing
from paceline.comm.line import BellAddress, WorkerLine
from paceline.comm.parameter_service import ADMITTED, STOP, VOID, identity_of
from paceline.comm.segment import Segment
from paceline.comm.wire import Caller, Keys, Kind, Message, Raw, WireError, from_frames, raw_bytes, to_frames
from paceline.errors import Aborted, DeadlineExceeded
from paceline.layout import Layout
from paceline.server.ranges import KeyRange, cut
from paceline.server.state import join, split

_ON_LINE = frozenset({Kind.INITIALISE, Kind.EXCHANGE, Kind.WAIT, Kind.PULL, Kind.LEAVE})
# A waiting worker first offers its core, where the server then runs without being woken on another. Conv net, two
# workers and a server on two cores, medians of three: ps-bsp 42,000 samples/s sleeping at once, 50,000 so; ps-asp
# 50,000 and 55,000. With more workers than cores they sleep at once, for others can use the core.
_YIELD_S = 1e-3
WAKE_S = 0.2  # how often a wait looks whether the run was aborted


@dataclass(frozen=True)
class ServerAddress:
    """Where a server listens, and, if it runs on this worker's host, its bell."""

    endpoint: str
    bell: BellAddress | None

    @property
    def is_local(self) -> bool:
        return self.bell is not None


Configure = Callable[[Layout, OptimizerSpec, Sequence[KeyRange]], None]


@final
class ServerGroup(Store):
    """Speaks to every server at once.

    Args:
        keys: of the run.
        servers: in the order of their key ranges.
        collective: of the workers, for the hand-over at the start.
        configure: has every server build its shard; called by rank 0.
        epoch: membership epoch.
        deadline_s: how long a server may take to answer; none: for ever.
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
        self._servers = list(servers)
        self._callers = [
            Caller(keys, endpoint=server.endpoint, identity=identity_of(collective.rank).decode())
            for server in self._servers
        ]
        self._poller = zmq.Poller()
        for caller in self._callers:
            self._poller.register(caller.socket, zmq.POLLIN)
        yield_s = _YIELD_S if collective.size <= len(os.sched_getaffinity(0)) else 0.0
        self._lines = [
            WorkerLine(server.bell, yield_s=yield_s) if server.bell is not None else None for server in self._servers
        ]
        self._segments: list[Segment] = []
        self._abort_reason: str | None = None
        self._ranges: list[KeyRange] = []
        self._layout: Layout | None = None
        self._parameters: list[list[Tensor]] = []
        self._gradients: list[list[Tensor]] = []
        self._moved_bytes = 0
        # A clock for each server: with backup workers a gradient may be late for one server and in time for another.
        self._clocks = [0] * len(self._servers)

    def allocate(self, num_bytes: int) -> Tensor:
        segment = Segment.create(num_bytes)
        self._segments.append(segment)
        return segment.tensor[:num_bytes]

    def attach(self, layout: Layout, spec: OptimizerSpec, parameters: Tensor, gradients: Tensor) -> None:
        self._layout = layout
        self._ranges = cut(layout, num_servers=len(self._servers), whole_tensors=not spec.element_wise)
        self._parameters = [[piece.view(layout, parameters) for piece in pieces] for pieces in self._ranges]
        self._gradients = [[piece.view(layout, gradients) for piece in pieces] for pieces in self._ranges]
        self._moved_bytes = 2 * layout.num_bytes
        if self._collective.rank == 0:
            self._configure(layout, spec, self._ranges)
        self._collective.barrier()
        memory = {"parameters": self._address_of(parameters), "gradients": self._address_of(gradients)}
        bodies = [memory | {"line": astuple(line.address)} if line is not None else {} for line in self._lines]
        self._ask("attach", [self._message(Kind.ATTACH, body=body) for body in bodies])
        self._collective.barrier()
        self._initialise(iteration=0)

    def exchange(self, push: Push) -> Reply:
        body = {} if push.groups is None else {"groups": [dict(group) for group in push.groups]}
        requests = []
        for server, gradients, clock in zip(self._servers, self._gradients, self._clocks, strict=True):
            payload = [] if server.is_local or push.void else to_frames(gradients)
            flags = (VOID if push.void else 0) | (STOP if push.stop else 0)
            requests.append(
                self._message(
                    Kind.EXCHANGE, flags=flags, clock=clock, pause_at=push.pause_at, body=body, payload=payload
                )
            )
        return self._receive(f"exchange of clock {self._clocks[0]}", requests)

    def wait_for_admission(self, *, pause_at: int) -> Reply:
        return self._receive("admission", [self._message(Kind.WAIT, pause_at=pause_at) for _ in self._servers])

    def pull(self) -> int:
        answers = self._ask("pull", [self._message(Kind.PULL) for _ in self._servers])
        self._take(answers)
        return answers[0].iteration

    def leave(self) -> None:
        self._ask("leave", [self._message(Kind.LEAVE) for _ in self._servers])

    def optimizer_state(self) -> dict[str, Tensor]:
        answers = self._ask("optimizer state", [self._message(Kind.GET_STATE) for _ in self._servers])
        parts = [safetensors.torch.load(_joined(answer)) for answer in answers]
        return join(self._attached(), self._ranges, parts)

    def load_state(self, state: Mapping[str, Tensor], *, iteration: int) -> None:
        if self._collective.rank == 0:
            parts = split(self._attached(), self._ranges, state)
            payloads = [memoryview(safetensors.torch.save(part)) for part in parts]
            self._ask("optimizer state", [self._message(Kind.SET_STATE, payload=[raw]) for raw in payloads])
        self._initialise(iteration=iteration)

    def abort(self, reason: str) -> None:
        self._abort_reason = reason

    def close(self) -> None:
        for caller in self._callers:
            caller.close()
        self._parameters, self._gradients = [], []
        for line in self._lines:
            if line is not None:
                line.close()
        self._lines.clear()
        for segment in self._segments:
            segment.close()
        self._segments.clear()

    def _initialise(self, *, iteration: int) -> None:
        """Rank 0 gives the servers its parameters; nobody goes on before they have them."""
        if self._collective.rank == 0:
            requests = []
            for server, parameters in zip(self._servers, self._parameters, strict=True):
                payload = [] if server.is_local else to_frames(parameters)
                requests.append(self._message(Kind.INITIALISE, iteration=iteration, payload=payload))
            self._ask("initial parameters", requests)
        self._collective.barrier()

    def _receive(self, what: str, requests: Sequence[Message]) -> Reply:
        """Ask, account the time, and take the parameters that came."""
        began_s = time.perf_counter()
        answers = self._ask(what, requests)
        self._take(answers)
        elapsed_s = time.perf_counter() - began_s
        waiting_s = min(elapsed_s, max(answer.waiting_s for answer in answers))
        self.timing.waiting_s += waiting_s
        self.timing.communication_s += elapsed_s - waiting_s
        self.timing.moved_bytes += self._moved_bytes
        self._clocks = [answer.clock for answer in answers]
        return Reply(
            iteration=answers[0].iteration,
            staleness=tuple(answer.staleness for answer in answers),
            stop=bool(answers[0].flags & STOP),
            admitted=all(answer.flags & ADMITTED for answer in answers),
        )

    def _take(self, answers: Sequence[Message]) -> None:
        for server, answer, parameters in zip(self._servers, answers, self._parameters, strict=True):
            if not server.is_local:
                from_frames(answer.payload, parameters)

    def _ask(self, what: str, requests: Sequence[Message]) -> list[Message]:
        """One request to each server, and each one's answer.

        Raises:
            DeadlineExceeded, Aborted, WireError: naming the server and what was asked.
        """
        give_up_s = None if self._deadline_s is None else time.monotonic() + self._deadline_s
        on_line = [self._send(index, request) for index, request in enumerate(requests)]
        answers: dict[int, Message] = {}
        while len(answers) < len(requests):
            if self._abort_reason is not None:
                raise Aborted(f"{what} on rank {self._collective.rank} was ended: {self._abort_reason}")
            for index, frames in self._receive_some(on_line, answers):
                answers[index] = Message.decode(frames, epoch=self._epoch)
                if answers[index].kind is Kind.ERROR:
                    raise WireError(f"{what} was refused by {answers[index].body.get('error')}")
            if give_up_s is not None and time.monotonic() > give_up_s:
                silent = [index for index in range(len(requests)) if index not in answers]
                raise DeadlineExceeded(
                    f"rank {self._collective.rank}: server(s) {silent} did not answer within {self._deadline_s:g} s "
                    f"to: {what}"
                )
        return [answers[index] for index in range(len(requests))]

    def _send(self, index: int, request: Message) -> bool:
        """Ask one server, on its line if it has one and the request fits; returns whether that was so."""
        line = self._lines[index]
        if line is not None and request.kind in _ON_LINE and line.send(request.encode_head()):
            return True
        self._callers[index].send(request)
        return False

    def _receive_some(self, on_line: Sequence[bool], answers: Mapping[int, Message]) -> list[tuple[int, Sequence[Raw]]]:
        """Wait a while for one of the servers that have not answered; lines first, whose servers are the quickest."""
        for index, line in enumerate(self._lines):
            if line is not None and on_line[index] and index not in answers:
                frames = line.receive(timeout_s=WAKE_S)
                return [] if frames is None else [(index, frames)]
        ready = {socket for socket, _ in self._poller.poll(int(WAKE_S * 1000))}
        return [
            (index, caller.socket.recv_multipart(copy=False))
            for index, caller in enumerate(self._callers)
            if caller.socket in ready
        ]

    def _message(self, kind: Kind, **fields: Any) -> Message:
        return Message(kind, self._epoch, sender=self._collective.rank, **fields)

    def _attached(self) -> Layout:
        if self._layout is None:
            raise WireError("the servers have not been attached yet")
        return self._layout

    def _address_of(self, tensor: Tensor) -> tuple[int, ...]:
        segment = next(s for s in self._segments if s.tensor.data_ptr() == tensor.data_ptr())
        return astuple(segment.address)


def _joined(message: Message) -> bytes:
    return b"".join(raw_bytes(frame) for frame in message.payload)
