"""Where the ranks of a virtual world meet for collective operations and messages."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from paceline.comm.rank_errors import ALIKE
from paceline.comm.signature import Signature
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.network.exchange import Exchange
from paceline.engines.virtual.network.links import Network
from paceline.engines.virtual.network.patterns import Pattern
from paceline.engines.virtual.process import Signal
from paceline.errors import CallMismatch, PacelineError, PeerLost, TensorMismatch


@dataclass(eq=False)
class Call:
    signature: Signature
    pattern: "Callable[[Operation], Pattern]"
    payload: Any = None
    num_bytes: Any = 0.0
    """What it sends: one number, or one for each rank."""
    complete: "Callable[[Operation], None] | None" = None
    """Called on the last rank's call, when every rank has come."""
    done: Signal = field(default_factory=Signal)


@final
class Operation:
    """A collective operation, from when the first rank has come."""

    def __init__(self, first: Call) -> None:
        self.calls: dict[int, Call] = {}
        self.num_bytes: dict[int, Any] = {}
        self.error: PacelineError | None = None
        self.last_s: float | None = None
        self.exchange: Exchange | None = None
        self.signature = first.signature
        self.num_left = 0
        """Ranks that have yet to take its result."""

    @property
    def ready_s(self) -> float | None:
        """When the last rank came; without an end where they wait for one that is gone."""
        return math.inf if isinstance(self.error, PeerLost) else self.last_s

    def payloads(self) -> list[Any]:
        """What the ranks have brought, in their order."""
        return [self.calls[rank].payload for rank in sorted(self.calls)]


@dataclass(eq=False)
class Parcel:
    flat: Tensor
    is_lost: bool = False
    """It does not arrive, and its receiver knows when it should have."""
    sent_s: float = 0.0
    done: Signal = field(default_factory=Signal)


@dataclass(eq=False)
class Awaited:
    """A message that a rank is ready for."""

    target: Tensor
    sent_s: float | None = None
    """When what came was sent; infinite if it will never come."""
    is_lost: bool = False
    error: PacelineError | None = None
    done: Signal = field(default_factory=Signal)


@final
class Meeting:
    """Matches the ranks' calls and moves their messages, those between two ranks over `messages` if that is given. All
    methods are called on the timeline."""

    def __init__(
        self,
        timeline: EventQueue,
        network: Network,
        *,
        host_of: Sequence[int],
        ranks_by_host: Sequence[Sequence[int]],
        messages: Network | None = None,
    ) -> None:
        self.size = len(host_of)
        self.ranks_by_host = ranks_by_host
        self._timeline, self._network, self._host_of = timeline, network, host_of
        self._messages = messages or network
        self._operations: dict[int, Operation] = {}
        self._parcels: dict[tuple[int, int], deque[Parcel]] = {}
        self._awaited: dict[tuple[int, int], deque[Awaited]] = {}
        self._lost: str | None = None
        self.gone: set[int] = set()
        """Ranks from which nothing comes any more."""
        self.on_lost: list[Callable[[], object]] = []
        """Called when a rank is gone, or others join."""
        self.met_s = timeline.now_s
        """When all last came to an operation."""
        self.sent_s: dict[int, float] = {}
        """When each rank's last message to a mailbox was sent."""

    @property
    def is_lost(self) -> bool:
        """Whether it is over: a rank is gone, or others join."""
        return self._lost is not None

    # --- collective operations ----------------------------------------------------------------------------------

    def operation(self, number: int) -> Operation | None:
        """The operation of this number; none before a rank has come to it and once all are through."""
        return self._operations.get(number)

    def join(self, number: int, rank: int, call: Call) -> None:
        operation = self._operations.get(number)
        if operation is None:
            operation = self._operations[number] = Operation(call)
            operation.num_left = self.size
            operation.exchange = Exchange(
                self._network, self._host_of, call.pattern(operation), lambda done: self._through(operation, done)
            )
        operation.calls[rank] = call
        operation.num_bytes[rank] = call.num_bytes
        if call.signature != operation.signature and operation.error is None:
            first = next(iter(operation.calls))
            operation.error = CallMismatch(
                f"ranks do not ask for the same: rank {first} for {operation.signature}, "
                f"rank {rank} for {call.signature}; {ALIKE}"
            )
        if self._lost is not None and operation.error is None:
            operation.error = PeerLost(self._lost)
        if operation.error is not None:
            self._break_off(operation)
            return
        if len(operation.calls) == self.size:
            operation.last_s = self.met_s = self._timeline.now_s
            if call.complete is not None:
                call.complete(operation)
        assert operation.exchange is not None
        operation.exchange.join(rank)

    def lose(self, reason: str, *, rank: int | None = None) -> None:
        """A rank is gone, or takes no further part, or another is to join. What all have come to is completed by all
        that are left, and nothing else: so either all have a result or nobody has. Messages that have not come do not
        come any more."""
        self._lost = reason
        if rank is not None:
            self.gone.add(rank)
        for operation in self._operations.values():
            if len(operation.calls) < self.size and operation.error is None:
                operation.error = PeerLost(reason)
                self._break_off(operation)
        for places in self._awaited.values():
            while places:
                self._give_up(places.popleft(), reason)
        for told in self.on_lost:
            told()

    def _break_off(self, operation: Operation) -> None:
        for call in operation.calls.values():
            if call.done.fired_s is None:
                call.done.fire(self._timeline)

    def _through(self, operation: Operation, rank: int) -> None:
        if operation.error is None:
            operation.calls[rank].done.fire(self._timeline)

    def forget(self, number: int) -> None:
        """No rank needs the operation any more."""
        self._operations.pop(number, None)

    def missing(self, number: int) -> list[int]:
        operation = self._operations.get(number)
        came = operation.calls if operation is not None else ()
        return [rank for rank in range(self.size) if rank not in came]

    def note_message(self, rank: int) -> None:
        """This rank has sent one to a mailbox."""
        self.sent_s[rank] = self._timeline.now_s

    # --- messages between two ranks -----------------------------------------------------------------------------

    def send(self, source: int, destination: int, parcel: Parcel) -> None:
        parcel.sent_s = self._timeline.now_s
        hosts = self._host_of
        pair = source, destination
        self._messages.send(hosts[source], hosts[destination], parcel.flat.nbytes, self._deliver, pair, parcel)

    def receive(self, source: int, destination: int, awaited: Awaited) -> None:
        pair = source, destination
        if self._lost is not None and not self._parcels.get(pair):
            self._give_up(awaited, self._lost)
            return
        self._awaited.setdefault(pair, deque()).append(awaited)
        self._match(pair)

    def _give_up(self, awaited: Awaited, reason: str) -> None:
        awaited.error, awaited.sent_s = PeerLost(reason), math.inf
        awaited.done.fire(self._timeline)

    def _deliver(self, pair: tuple[int, int], parcel: Parcel) -> None:
        parcel.done.fire(self._timeline)
        self._parcels.setdefault(pair, deque()).append(parcel)
        self._match(pair)

    def _match(self, pair: tuple[int, int]) -> None:
        parcels, awaited = self._parcels.get(pair), self._awaited.get(pair)
        while parcels and awaited:
            parcel, place = parcels.popleft(), awaited.popleft()
            flat, target = parcel.flat, place.target
            place.is_lost = parcel.is_lost
            if flat.dtype == target.dtype and flat.numel() == target.numel():
                if not parcel.is_lost:
                    target.copy_(flat)
            else:
                place.error = TensorMismatch(
                    f"rank {pair[0]} sends {flat.numel()} elements of {flat.dtype}, and rank {pair[1]} receives "
                    f"{target.numel()} of {target.dtype}"
                )
            place.sent_s = parcel.sent_s
            place.done.fire(self._timeline)
