"""A server's loop: what it holds, behind a socket and lines. Tensors of workers on this host stay in shared memory."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, final

import zmq

from paceline.comm.servers.copies import NextCopies, server_of
from paceline.comm.servers.holding import Holding, Say, key_range_of
from paceline.comm.servers.line import Bell, BellAddress
from paceline.comm.wire import Keys, Listener
from paceline.errors import PeerLost
from paceline.messages import Message
from paceline.records import NullReporter, Reporter
from paceline.server.admission import Decisions
from paceline.server.chains import Chain
from paceline.server.replication import Copied, HandedOver
from paceline.server.spec import ServerSpec
from paceline.server.whole_pushes import Parted

POLL_S = 0.1
_ERRAND_S = 600.0  # the launcher, which asks, gives up before


@final
class ParameterService:
    """Serves one key range, of each optimizer of a run, to its workers until `stop`.

    Args:
        keys: of the run.
        host: the address to listen on.
        index: which server of the group this is.
        epoch: membership epoch; requests of another one are refused.
        reporter: gets a record for every gradient that the first optimizer applies.
        on_serving: told of each chain of copies that is as it was told to be, and has this server at its head.
        on_told: told what has become of a new copy, or of a handover.
    """

    def __init__(
        self,
        keys: Keys,
        *,
        host: str,
        index: int,
        epoch: int,
        reporter: Reporter,
        on_serving: Callable[[Chain], None] = lambda chain: None,
        on_told: Callable[[Copied | HandedOver], None] = lambda told: None,
    ) -> None:
        self._listener = Listener(keys, host=host)
        self.endpoint = self._listener.endpoint
        self._bell = Bell()
        self._index, self._epoch, self._reporter = index, epoch, reporter
        self._on_serving, self._on_told = on_serving, on_told
        self._poller = zmq.Poller()
        self._next_copies = NextCopies(keys, server=index, poller=self._poller)
        self._copies: dict[int, Holding] = {}  # by key range, of those that have copies
        self._has_copies = False
        self._changed: deque[tuple[Chain, Mapping[int, str]]] = deque()
        self._specs: dict[int, ServerSpec] = {}  # by key range, of those that have copies
        self._first = Holding(index=index, number=0, epoch=epoch, reporter=reporter, send=self._listener.send)
        self._holdings = [self._first]
        self._asked: dict[bytes, Holding] = {}  # by the identity of who asks, of the run's other optimizers
        self._errands: deque[tuple[Callable[[Say], None], Future[Any]]] = deque()
        self._is_stopping = False

    @property
    def bell(self) -> BellAddress:
        """What workers on this host ring after a request on their line."""
        return self._bell.address

    @property
    def iteration(self) -> int:
        return max(holding.iteration for holding in (self._first, *self._copies.values()))

    def configure(self, spec: ServerSpec) -> None:
        """Build the shards for one optimizer; called once for each in order, before any worker attaches to it. Raises
        UsageError for an unfit aggregator."""
        if spec.number:
            holding = Holding(
                index=self._index,
                number=spec.number,
                epoch=self._epoch,
                reporter=NullReporter(),
                send=self._listener.send,
            )
            holding.configure(spec)
            self._asked |= {holding.identity_of(rank): holding for rank in spec.rule.members.ranks}
            self._holdings.append(holding)
        else:
            self._first.configure(spec)

    def replicate(self, spec: ServerSpec, chain: Chain, *, endpoints: Mapping[int, str]) -> None:
        """Build one copy of a key range, which is served by the first of the chain; called once for each, before any
        worker attaches.

        Args:
            endpoints: of all servers.
        """
        self._next_copies.endpoints |= endpoints
        self._build(spec, chain)

    def replicate_anew(self, spec: ServerSpec, chain: Chain, *, endpoints: Mapping[int, str]) -> None:
        """Build what is to become a copy, as this server is the chain's newcomer; called from another thread. Raises
        what that raises, such as for want of memory; this server goes on."""

        def build(say: Say) -> None:
            try:
                self.replicate(spec, chain, endpoints=endpoints)
            except Exception as error:  # the key ranges that this server has are none the worse
                say(error)
            else:
                say(None)

        error = self._sent_on_errand(build)
        if error is not None:
            raise error

    def spec_of(self, key_range: int) -> ServerSpec:
        """Return what another server builds a copy of this key range by, of which this one has a copy."""
        return self._specs[key_range].anew()

    def _build(self, spec: ServerSpec, chain: Chain) -> None:
        self._has_copies = True
        self._let_drop(chain.key_range)  # what has not become a copy
        holding = Holding(
            index=chain.key_range,
            number=0,
            epoch=chain.epoch,
            reporter=self._reporter,
            send=self._listener.send,
            is_copy=chain.key_range != self._index,
            on_told=self._on_told,
        )
        try:
            holding.configure(spec, has_copies=True)
        except BaseException:
            holding.close()
            raise
        holding.replicate(chain, server=self._index, send_on=self._next_copies.send)
        self._holdings.append(holding)
        self._specs[chain.key_range], self._copies[chain.key_range] = spec, holding

    def _let_drop(self, key_range: int) -> None:
        """This server has no copy of it any more."""
        if key_range in self._copies:
            holding = self._copies.pop(key_range)
            self._holdings.remove(holding)
            self._next_copies.leave(key_range)
            holding.close()

    def reform(self, chain: Chain, *, endpoints: Mapping[int, str] = MappingProxyType({})) -> None:
        """A chain that this server is in, or was, has changed; callable from any thread.

        Args:
            endpoints: of servers that have joined those of the start.
        """
        self._changed.append((chain, endpoints))
        self._bell.ring()

    def part_with(self, key_range: int, worker: int) -> Parted:
        """As `Attendance.part_with`, once all is done that the worker had asked; called from another thread, for the
        one optimizer of a run, of a key range that this server serves."""
        parted: Parted = self._sent_on_errand(lambda say: self._holding_of(key_range).part_with(worker, say))
        return parted

    def let_go(self, key_range: int, worker: int, counts: Message | None, decided: Decisions) -> Decisions:
        """Have the server do `Attendance.let_go`; another thread calls this. Returns what `decided` is then."""
        mine: Decisions = self._sent_on_errand(
            lambda say: self._holding_of(key_range).let_go(worker, counts, decided, say)
        )
        return mine

    def expect(self, key_range: int, worker: int) -> int:
        """Has this server's loop call `Attendance.expect`. May be called from another thread."""
        clock: int = self._sent_on_errand(lambda say: self._holding_of(key_range).expect(worker, say))
        return clock

    def let_in(self, key_range: int, worker: int, clock: int) -> None:
        """Has this server's loop call `Attendance.let_in`. May be called from another thread."""
        self._sent_on_errand(lambda say: self._holding_of(key_range).let_in(worker, clock, say))

    def _holding_of(self, key_range: int) -> Holding:
        """Raises KeyError where this server has let go of its copy."""
        return self._copies[key_range] if self._has_copies else self._first

    def _sent_on_errand(self, errand: Callable[[Say], None]) -> Any:
        """What the errand says, which the loop begins. Raises TimeoutError."""
        future: Future[Any] = Future()
        self._errands.append((errand, future))
        self._bell.ring()
        return future.result(timeout=_ERRAND_S)

    def _run_errands(self) -> None:
        if self._errands:
            self._handle_lines()
        while self._errands:
            errand, future = self._errands.popleft()
            errand(future.set_result)

    def serve(self) -> None:
        """Answer requests until `stop` is called. Raises what an update raised; then nothing is served any more."""
        self._poller.register(self._listener.socket, zmq.POLLIN)
        self._poller.register(self._bell.fd, zmq.POLLIN)
        try:
            while not self._is_stopping:
                wakes_in_s = min(POLL_S, *(holding.wakes_in_s for holding in self._holdings))
                for source, _ in self._poller.poll(math.ceil(max(0.0, wakes_in_s) * 1000)):
                    if source == self._bell.fd:
                        self._handle_lines()
                    elif source is self._listener.socket:
                        self._handle_socket()
                for key_range, server, frames in self._next_copies.receive():
                    self._copies[key_range].handle_copy(server, frames)
                self._run_errands()
                while self._changed:
                    self._reform(*self._changed.popleft())
                for holding in self._holdings:
                    holding.look()
        finally:
            self._close()

    def stop(self) -> None:
        self._is_stopping = True

    def _close(self) -> None:
        self._next_copies.close()
        self._listener.close()
        self._bell.close()
        for holding in self._holdings:
            holding.close()

    def _handle_lines(self) -> None:
        """Answer every request on a line; one that comes meanwhile rings again."""
        self._bell.silence()
        for holding in self._holdings:
            for identity, neighbour in list(holding.neighbours.items()):
                try:
                    frames = neighbour.line.receive()
                except PeerLost as error:
                    neighbour.line.send(holding.core.failure(error).encode())
                    continue
                if frames is not None:
                    neighbour.asked_on_line = True
                    holding.handle(identity, frames)

    def _handle_socket(self) -> None:
        asked = self._listener.receive()
        if asked is None:
            return
        identity, frames = asked
        copy_before = server_of(identity)
        key_range = key_range_of(identity, self._index)
        if self._has_copies and key_range not in self._copies:
            return  # it is about to hear that this server has let go of its copy
        if copy_before is not None and self._has_copies:
            self._copies[key_range].handle_copy(copy_before, frames)
            return
        holding = self._asked.get(identity) or self._holding_of(key_range)
        if identity in holding.neighbours:
            holding.neighbours[identity].asked_on_line = False
        holding.handle(identity, frames)

    def _reform(self, chain: Chain, endpoints: Mapping[int, str]) -> None:
        self._next_copies.endpoints |= endpoints
        holding = self._copies.get(chain.key_range)
        if holding is None or chain.version <= holding.version:
            return  # it was told before this one was built, or after it was let drop
        if self._index not in (*chain.servers, chain.newcomer):
            self._let_drop(chain.key_range)
        else:
            holding.reform(chain)
            if chain.head == self._index:
                self._on_serving(chain)
