"""Messages to real servers: over lines in shared memory to those on this host, over sockets to others."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, final

import zmq
from torch import Tensor

from paceline.comm.base import Collective
from paceline.comm.rank_errors import ALIKE
from paceline.comm.servers.carrier import Carrier, Turn
from paceline.comm.servers.group import Configure, Joins, ServerGroup
from paceline.comm.servers.holding import identity_of
from paceline.comm.servers.line import BellAddress, WorkerLine
from paceline.comm.servers.loan import Loan
from paceline.comm.servers.self_service import SelfService, SelfServices
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.comm.wire import Caller, Keys
from paceline.errors import Aborted, CallMismatch, DeadlineExceeded, PeerLost
from paceline.layout import Layout
from paceline.messages import Kind, Message, Raw
from paceline.server.actions import Send
from paceline.server.client_core import ClientCore
from paceline.server.conversation import Conversation, hear
from paceline.server.spec import OptimizerSpec, Push, Reply

_ON_LINE = frozenset({Kind.INITIALISE, Kind.EXCHANGE, Kind.COUNT, Kind.WAIT, Kind.PULL, Kind.LEAVE}) | {
    Kind.STEP_ASIDE,
    Kind.COME_BACK,
    Kind.READ_ROWS,
    Kind.PUSH_ROWS,
    Kind.CHANGED_ROWS,
}
# A waiting worker first offers its core, where the server then runs without being woken on another. Conv net, two
# workers and a server on two cores, medians of three: ps-bsp 42,000 samples/s sleeping at once, 50,000 so; ps-asp
# 50,000 and 55,000. With more workers than cores they sleep at once, for others can use the core.
_YIELD_S = 1e-3
_LOOK_S, _STANDS_S = 1.0, 8.0  # a wait looks after so long for others that wait elsewhere, which is no chance then
WAKE_S = 0.2  # how often a wait looks whether the run was aborted
_GLANCE_S = 2e-3  # how often it looks at the lines, where servers elsewhere wait for what one here decides


@dataclass(frozen=True)
class ServerAddress:
    """Where a server listens, and, if it runs on this worker's host, its bell."""

    endpoint: str
    bell: BellAddress | None
    epoch: int | None = None
    """The epoch that messages to and from it name; none: the run's."""
    copy_of: int | None = None
    """The key range, which another server had at the start."""


@dataclass(frozen=True)
class Move:
    """Another server has this key range from now on."""

    key_range: int
    address: ServerAddress


Moves = deque[Move]
"""The moves that a worker has yet to follow; filled from any thread."""


def connect_servers(
    keys: Keys,
    *,
    servers: Sequence[ServerAddress],
    collective: Collective,
    configure: Configure,
    epoch: int,
    deadline_s: float | None,
    number: int = 0,
    moves: Moves | None = None,
    joins: Joins | None = None,
) -> ServerGroup:
    """A worker's store.

    Args:
        keys: of the run.
        servers: in the order of their key ranges.
        collective: of the workers.
        configure: has every server build its shards; called by rank 0.
        epoch: of the membership.
        deadline_s: how long servers may all be silent while an answer is due; none: for ever.
        number: of the run's optimizer that it is for.
        moves: where servers have replicas, of those that have died; else a server that is gone is an error at once.
        joins: where this worker joins others that train, whom the collective does not know.
    """
    carrier = SocketCarrier(
        keys,
        servers,
        rank=collective.rank if joins is None else joins.rank,
        num_workers=collective.size,
        epoch=epoch,
        deadline_s=deadline_s,
        number=number,
        moves=moves,
    )
    return ServerGroup(carrier, collective=collective, configure=configure, epoch=epoch, joins=joins)


@dataclass
class _Link:
    """One server, as this worker reaches it."""

    caller: Caller
    line: WorkerLine | None
    """The quick way to a server on this host."""
    epoch: int
    """What this server's messages carry, and those to it."""
    sources: list[Tensor] = field(default_factory=list)
    """The server's own parameters, if this worker is to read them itself."""
    targets: list[Tensor] = field(default_factory=list)
    asked_over: WorkerLine | Caller | None = None
    """Where its answers will come from; none if it has not been asked yet."""

    def close(self) -> None:
        self.caller.close()
        self.sources, self.targets = [], []
        line, self.line = self.line, None
        if line is not None:
            line.close()


@final
class SocketCarrier(Carrier):
    carries_bytes = True

    def __init__(
        self,
        keys: Keys,
        servers: Sequence[ServerAddress],
        *,
        rank: int,
        num_workers: int,
        epoch: int,
        deadline_s: float | None,
        number: int = 0,
        moves: Moves | None = None,
    ) -> None:
        self._rank, self._num_workers, self._deadline_s = rank, num_workers, deadline_s
        self._keys, self._moves = keys, moves
        self._client: ClientCore | None = None
        self._ahead: Conversation | None = None
        self._memory: Mapping[str, Any] = {}
        self._yield_s = _YIELD_S if num_workers <= len(os.sched_getaffinity(0)) else 0.0
        self.beside = [server.bell is not None for server in servers]
        self.is_all_beside = all(self.beside) and moves is None
        self.takes_rows_along = self.is_all_beside or moves is not None
        self.reads_ahead = moves is None
        self._epoch, self._number = epoch, number
        self._called: set[tuple[str, str]] = set()  # where, and by which name
        self._links = [self._first_link_to(server) for server in servers]
        self.epochs = [link.epoch for link in self._links]
        self._poller = zmq.Poller()
        for link in self._links:
            self._register(link.caller)
        self._segments: list[SharedBlock] = []
        self._self_services: SelfServices | None = None
        self._abort_reason: str | None = None
        self._stands_since_s: float | None = None  # since when another worker is known to wait elsewhere
        self._look_s = WAKE_S  # how often a wait for servers elsewhere looks at the lines too

    def begin(self, client: ClientCore) -> None:
        self._client = client

    def allocate(self, num_bytes: int) -> Tensor:
        segment = SharedBlock.create(num_bytes)
        self._segments.append(segment)
        return segment.tensor[:num_bytes]

    def bodies(self, parameters: Tensor, gradients: Tensor) -> Sequence[Mapping[str, Any]]:
        self._memory = {"parameters": self._address_of(parameters), "gradients": self._address_of(gradients)}
        return [self._body(link) for link in self._links]

    def _body(self, link: _Link) -> dict[str, Any]:
        if link.line is None:
            return {}
        return {**self._memory, "line": astuple(link.line.address), "borrows": self.is_all_beside}

    def attached(
        self, client: ClientCore, layout: Layout, spec: OptimizerSpec, said: Sequence[Mapping[str, Any]]
    ) -> None:
        self._look_s = _GLANCE_S if client.has_followers else WAKE_S
        for index, (link, about) in enumerate(zip(self._links, said, strict=True)):
            if "parameters" in about:
                segment = SharedBlock.open(BlockAddress(*about["parameters"]))
                self._segments.append(segment)
                pieces, link.targets = client.targets(index)
                link.sources = [piece.view(layout, segment.tensor[: layout.num_bytes]) for piece in pieces]
        if self.is_all_beside and all("loan" in about for about in said):
            loans = [about["loan"] for about in said]
            services = [self._borrow(client, layout, spec, *each) for each in enumerate(loans)]
            self._self_services = SelfServices(services)

    def _borrow(
        self, client: ClientCore, layout: Layout, spec: OptimizerSpec, server: int, loan: Mapping[str, Any]
    ) -> SelfService:
        pieces, parameters = client.targets(server)

        def open_gradients(addresses: Sequence[Sequence[int]]) -> list[list[Tensor]]:
            blocks = [SharedBlock.open(BlockAddress(*numbers)) for numbers in addresses]
            return [[piece.view(layout, block.tensor[: layout.num_bytes]) for piece in pieces] for block in blocks]

        block = SharedBlock.open(BlockAddress(*loan["address"]))
        self._segments.append(block)
        return SelfService(
            Loan(block.tensor, layout, pieces, loan["num_places"]),
            worker=self._rank,
            pieces=pieces,
            parameters=parameters,
            spec=spec,
            open_gradients=open_gradients,
        )

    def serve_itself(self, client: ClientCore, push: Push) -> Turn | None:
        services = self._self_services
        began_s = time.perf_counter()
        if services is None or self._abort_reason is not None or client.takes_rows_along:
            return None
        if not services.push(push.done):
            return None
        waited_s, served = 0.0, services.take()
        if served is None:
            waited_s = self._wait_for_turn(services)
            served = services.take()
        if served is None:
            return None
        client.served_itself(clock=served[0].clock)
        reply = Reply(served[0].iteration, tuple(each.staleness for each in served), stop=False, admitted=True)
        return Turn(reply, time.perf_counter() - began_s, waited_s)

    def _wait_for_turn(self, services: SelfServices) -> float:
        """Until others have pushed too; the seconds that took.

        Raises:
            DeadlineExceeded, Aborted: other workers have not pushed.
        """
        began_s = time.perf_counter()
        self._stands_since_s = None
        while not services.is_over:
            if self._abort_reason is not None:
                raise Aborted(f"an exchange on rank {self._rank} was ended: {self._abort_reason}")
            waited_s = time.perf_counter() - began_s
            if waited_s > _LOOK_S:
                self._require_others(began_s + waited_s)
            if self._deadline_s is not None and waited_s > self._deadline_s:
                raise DeadlineExceeded(f"rank {self._rank}: others did not push within {self._deadline_s:g} s")
            if waited_s < self._yield_s:
                os.sched_yield()
            else:
                services.sleep(WAKE_S)
        return time.perf_counter() - began_s

    def carry(self, client: Conversation, sends: Iterable[Send]) -> float:
        began_s = heard_s = time.perf_counter()
        self._stands_since_s = None
        for link in self._links:
            link.asked_over = None
        self._send(sends)
        store = self._client
        while not (client.is_done and (store is None or store.is_done)):
            if self._abort_reason is not None:
                raise Aborted(f"{client.what} on rank {self._rank} was ended: {self._abort_reason}")
            if self._moves and store is not None:
                self._follow(self._moves.popleft(), store)
            due = client.due if store is None else sorted({*client.due, *store.new})
            for index, frames in self._receive_some(due):
                link = self._links[index]
                answer = Message.decode(frames, epoch=link.epoch)
                heard_by = self._ahead if self._ahead and answer.kind is Kind.READ_AHEAD else client
                self._send(heard_by.receive(index, answer) if store is None else hear(store, heard_by, index, answer))
                heard_s = time.perf_counter()
                if link.sources and answer.kind is Kind.ANSWER:
                    for source, target in zip(link.sources, link.targets, strict=True):
                        target.copy_(source)
            now_s = time.perf_counter()
            if now_s > heard_s + _LOOK_S:
                self._require_others(now_s)
            if self._deadline_s is not None and now_s > heard_s + self._deadline_s:
                raise DeadlineExceeded(
                    f"rank {self._rank}: server(s) {due} did not answer within {self._deadline_s:g} s to: {client.what}"
                )
        return time.perf_counter() - began_s

    def set_off(self, conversation: Conversation, sends: Iterable[Send]) -> None:
        self._ahead = conversation
        self._send(sends)

    def _require_others(self, now_s: float) -> None:
        """Raise CallMismatch where this worker waits until all have pushed, and another one for it, elsewhere."""
        standing = None if self.standing is None else self.standing()
        if standing is None:
            self._stands_since_s = None
        elif self._stands_since_s is None:
            self._stands_since_s = now_s
        elif now_s > self._stands_since_s + _STANDS_S:
            raise CallMismatch(
                f"rank {self._rank} waits until all have pushed their gradients, and {standing}; {ALIKE}"
            )

    def _follow(self, move: Move, client: ClientCore) -> None:
        """Leave the server that had a key range, and ask the one that has it now. Nothing is done where that is gone as
        well: either another one takes over, or the run ends; nor where this is known already."""
        index = move.key_range
        if move.address.epoch is not None and move.address.epoch <= self._links[index].epoch:
            return
        with contextlib.suppress(PeerLost):
            line = self._line_to(move.address)
            for socket in self._links[index].caller.sockets:
                self._poller.unregister(socket)
            self._links[index].close()  # first: a server hears nobody else by a name that it has a connection of
            self._links[index] = link = self._link_over(line, move.address)
            self._register(link.caller)
            is_beside = link.line is not None
            self._send(client.moved(index, epoch=link.epoch, is_beside=is_beside, body=self._body(link)))

    def _first_link_to(self, server: ServerAddress) -> _Link:
        """Where servers have replicas, one that has just died answers nothing until another one has its place."""
        try:
            return self._link_to(server)
        except PeerLost:
            if self._moves is None:
                raise
            return self._link_to(replace(server, bell=None))

    def _link_to(self, server: ServerAddress) -> _Link:
        """Raises PeerLost where a server on this host has gone."""
        return self._link_over(self._line_to(server), server)

    def _line_to(self, server: ServerAddress) -> WorkerLine | None:
        """Raises PeerLost where it is on this host and has gone."""
        return None if server.bell is None else WorkerLine(server.bell, yield_s=self._yield_s)

    def _link_over(self, line: WorkerLine | None, server: ServerAddress) -> _Link:
        identity = identity_of(self._rank, self._number, server.copy_of).decode()
        call = server.endpoint, identity
        is_anew = call in self._called
        self._called.add(call)
        caller = Caller(self._keys, endpoint=server.endpoint, identity=identity, is_anew=is_anew)
        return _Link(caller, line, self._epoch if server.epoch is None else server.epoch)

    def abort(self, reason: str) -> None:
        self._abort_reason = reason

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._links.clear()
        self._client = self._ahead = None
        self._self_services = None
        for segment in self._segments:
            segment.close()
        self._segments.clear()

    def _send(self, sends: Iterable[Send]) -> None:
        """Send each request on the server's line, if it has one and the request fits."""
        for index, request in sends:
            link = self._links[index]
            link.asked_over, request.epoch = link.line, link.epoch
            try:
                if link.line is None or request.kind not in _ON_LINE or not link.line.send(request.encode()):
                    link.caller.send(request)
                    link.asked_over = link.caller
            except PeerLost:  # with replicas another server is to take over, and is asked then
                if self._moves is None:
                    raise

    def _receive_some(self, due: Sequence[int]) -> list[tuple[int, Sequence[Raw]]]:
        """Wait a while for those of the servers that owe an answer, and take what has come."""
        ways = [(index, self._links[index].asked_over) for index in due]
        # A server that says on its line that it holds a push has yet to be told that it counts.
        ways = [each for each in ways if not (isinstance(each[1], WorkerLine) and each[1].is_answered)]
        is_mixed = any(isinstance(way, Caller) for _, way in ways)
        wait_s = WAKE_S
        for index, way in ways:
            if isinstance(way, WorkerLine):
                frames = way.receive(timeout_s=0.0 if is_mixed else WAKE_S)
                if frames is not None or not is_mixed:
                    return [] if frames is None else [(index, frames)]
                wait_s = self._look_s
        self._poller.poll(int(wait_s * 1000))
        received = ((index, link.caller.receive()) for index, link in enumerate(self._links))
        return [(index, frames) for index, frames in received if frames is not None]

    def _register(self, caller: Caller) -> None:
        for socket in caller.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def _address_of(self, tensor: Tensor) -> tuple[int, ...]:
        segment = next(s for s in self._segments if s.tensor.data_ptr() == tensor.data_ptr())
        return astuple(segment.address)
