"""Messages pass full-duplex links that have bandwidth, latency and queues. Nothing here knows tensors."""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from paceline.engines.virtual.computing.cores import Thread
from paceline.engines.virtual.events import EventQueue

CHUNK_BYTES = 2**18
"""Parameter servers send messages of 1 MiB, and several of them are to share a link."""
WINDOW_BYTES = 2**18
"""The median window of an uneven connection, in bytes under way: a part of a server's piece."""
_UNEVEN_CHUNK_BYTES = 2**16
_RESTART_S = 0.2
"""A connection that was idle for so long begins anew, as TCP's do (RFC 5681, section 4.1; Linux's least timeout)."""


_Flow = tuple[int, bool]
"""The receiving host, and whether the messages are answers: these have a connection of their own."""


@dataclass(slots=True, eq=False)
class Link:
    """One direction of a cable, or a host's memory.

    A sender's own link serves the messages for different hosts in turns, a chunk each, as connections share a network
    card. Every other link takes chunks in the order in which they arrive.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    """Time from one end to the other."""
    burst_s: float = 0.0
    """How far the link may be behind in its work before chunks wait: a token bucket's size over its rate."""
    free_s: float = 0.0
    """When the link will be done with all that it has taken."""
    _flows: "dict[_Flow, deque[_Message]]" = field(default_factory=dict)
    """Messages that wait at their sender."""
    _turns: deque[_Flow] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Handling:
    """What a message that passes a host takes of its core, which has other work as well."""

    thread: Thread
    bytes_per_s: float
    message_s: float = 0.0
    """Time for each message, besides its bytes."""


Path = Sequence[Link | Handling]


class Paths(Protocol):
    """Returns the way from one host to another, the sender's link first; from a host to itself, its memory."""

    def __call__(self, source: int, destination: int) -> Path: ...


@dataclass(slots=True, eq=False)
class _Message:
    path: Path
    left_bytes: float
    action: Callable[..., object]
    arguments: tuple[Any, ...]
    connection: "_Connection | None" = None
    """None where the sender serves hosts in turns."""


@dataclass(slots=True, eq=False)
class _Connection:
    """One way between two hosts, with a window: as many bytes may follow as have arrived.

    A connection's rate is its window over the time that a chunk is under way. So connections that meet at a link share
    it in proportion to their windows, and a sender idles while all its windows wait elsewhere.
    """

    random: random.Random
    unevenness: float
    free_bytes: float
    """What is on the way while nobody has to wait; added to every window."""
    window_bytes: float = 0.0
    under_way_bytes: float = 0.0
    num_under_way: int = 0
    """Chunks: sums of bytes do not come back to 0 exactly."""
    idle_since_s: float = -math.inf
    waiting: deque[_Message] = field(default_factory=deque)

    def restart(self) -> None:
        factor = math.exp(self.random.gauss(0.0, self.unevenness))
        self.window_bytes = max(2.0 * _UNEVEN_CHUNK_BYTES, WINDOW_BYTES * factor) + self.free_bytes


@final
class Network:
    """Moves messages among hosts on a timeline.

    A message is cut into chunks, so that messages share a link. Chunks cut through: the next link begins to pass one on
    when its head arrives, and ends no earlier than its tail has arrived. So a lone message of M bytes takes exactly its
    path's latency and M over the least bandwidth, and n messages to one receiver take n M over its bandwidth. Queues
    between links are unbounded: unless connections have windows, a busy receiver does not slow its senders.

    Args:
        timeline: on which chunks move.
        paths: the links between hosts.
        chunk_bytes: the largest chunk. With infinity messages pass whole, one after the other.
        unevenness: the standard deviation of the logarithm of connections' windows. With 0 senders serve hosts in turns
            instead, so all connections get as much.
        seed: what windows are drawn from.
        least_s: the least time that a message takes from one host to another.
    """

    def __init__(
        self,
        timeline: EventQueue,
        paths: Paths,
        *,
        chunk_bytes: float = CHUNK_BYTES,
        unevenness: float = 0.0,
        seed: int = 0,
        least_s: float = 0.0,
    ) -> None:
        self._least_s = least_s
        self._timeline, self._paths, self._chunk_bytes = timeline, paths, chunk_bytes
        self._unevenness, self._seed = unevenness, seed
        self._connections: dict[tuple[int, int, bool], _Connection] = {}

    def send(
        self,
        source: int,
        destination: int,
        num_bytes: float,
        action: Callable[..., object],
        *arguments: Any,
        is_answer: bool = False,
    ) -> None:
        """Start now; `action(*arguments)` is called when the last byte has arrived.

        Messages from one host to another arrive in the order in which they were sent, and so do answers.
        """
        path = self._paths(source, destination)
        if self._least_s and source != destination:
            action, arguments = self._no_sooner, (self._timeline.now_s + self._least_s, action, *arguments)
        message = _Message(path, num_bytes, action, arguments)
        if self._unevenness > 0 and source != destination:
            self._send_unevenly(message, (source, destination, is_answer))
            return
        port = _first(path)
        is_idle = not port._turns
        is_free = is_idle and port.free_s - port.burst_s <= self._timeline.now_s
        if is_free and num_bytes <= self._chunk_bytes:
            # A shortcut: it takes 3.1 us instead of 4.0 us for a message of a ring.
            self._depart(message, num_bytes, is_last=True)
            return
        flow = (destination, is_answer)
        if flow in port._flows:
            port._flows[flow].append(message)
            return
        port._flows[flow] = deque((message,))
        port._turns.append(flow)
        if is_free:
            self._serve(port)
        elif is_idle:
            self._timeline.at(port.free_s - port.burst_s, self._serve, port)

    def _no_sooner(self, least_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Call this no sooner than at such a time."""
        if self._timeline.now_s < least_s:
            self._timeline.at(least_s, action, *arguments)
        else:
            action(*arguments)

    def _serve(self, port: Link) -> None:
        """The sender's link is free: pass a chunk of the flow whose turn it is."""
        flow = port._turns.popleft()
        waiting = port._flows[flow]
        message = waiting[0]
        chunk_bytes = min(message.left_bytes, self._chunk_bytes)
        message.left_bytes -= chunk_bytes
        is_last = message.left_bytes <= 0
        if is_last:
            waiting.popleft()
        if waiting:
            port._turns.append(flow)
        else:
            del port._flows[flow]
        end_s = self._depart(message, chunk_bytes, is_last)
        if port._turns:
            self._timeline.at(end_s, self._serve, port)

    def _depart(self, message: _Message, chunk_bytes: float, is_last: bool) -> float:
        """Pass a chunk over its sender's link; returns when that is done, in seconds."""
        port, timeline = _first(message.path), self._timeline
        # Messages of other paths may keep this link busy, too: then it starts later than now.
        start_s, end_s = _pass(port, timeline.now_s, chunk_bytes)
        if len(message.path) > 1:
            head_s, tail_s = start_s + port.latency_s, end_s + port.latency_s
            timeline.at(head_s, self._enter, message, 1, chunk_bytes, tail_s, is_last)
        elif is_last:
            timeline.at(end_s + port.latency_s, message.action, *message.arguments)
        return end_s

    def _enter(self, message: _Message, hop: int, chunk_bytes: float, tail_s: float, is_last: bool) -> None:
        """A chunk's head has come to the link number `hop` of its path; its tail comes at `tail_s`."""
        link, now_s = message.path[hop], self._timeline.now_s
        if isinstance(link, Handling):
            self._handle(link, message, hop, chunk_bytes, tail_s, is_last)
            return
        start_s, end_s = _pass(link, now_s, chunk_bytes)
        latency_s = link.latency_s
        self._leave(message, hop, chunk_bytes, start_s + latency_s, max(end_s, tail_s) + latency_s, is_last)

    def _handle(
        self, by: Handling, message: _Message, hop: int, chunk_bytes: float, tail_s: float, is_last: bool
    ) -> None:
        """Pass a chunk on when the core has done its work."""
        timeline = self._timeline

        def leave() -> None:
            self._leave(message, hop, chunk_bytes, timeline.now_s, max(timeline.now_s, tail_s), is_last)

        by.thread.run(chunk_bytes / by.bytes_per_s + (by.message_s if is_last else 0.0), leave)

    def _leave(
        self, message: _Message, hop: int, chunk_bytes: float, head_s: float, tail_s: float, is_last: bool
    ) -> None:
        """A chunk's head and tail leave what is number `hop` of its path at these times."""
        timeline = self._timeline
        if hop + 1 < len(message.path):
            timeline.at(head_s, self._enter, message, hop + 1, chunk_bytes, tail_s, is_last)
        elif message.connection is not None:
            timeline.at(tail_s, self._arrive, message, message.connection, chunk_bytes, is_last)
        elif is_last:
            timeline.at(tail_s, message.action, *message.arguments)

    # --- connections with windows --------------------------------------------------------------------------------

    def _send_unevenly(self, message: _Message, name: tuple[int, int, bool]) -> None:
        connection = self._connections.get(name)
        if connection is None:
            links = [link for link in message.path if isinstance(link, Link)]
            free_bytes = sum(link.latency_s for link in links) * min(link.bytes_per_s for link in links)
            draws = random.Random(f"{self._seed} {name}")
            connection = self._connections[name] = _Connection(draws, self._unevenness, free_bytes)
        message.connection = connection
        is_idle = not connection.waiting and not connection.num_under_way
        if is_idle and self._timeline.now_s - connection.idle_since_s > _RESTART_S:
            connection.restart()
        connection.waiting.append(message)
        self._fill(connection)

    def _fill(self, connection: _Connection) -> None:
        """Send what the window has room for, but one chunk at least."""
        while connection.waiting:
            message = connection.waiting[0]
            chunk_bytes = min(message.left_bytes, _UNEVEN_CHUNK_BYTES)
            if connection.num_under_way and connection.under_way_bytes + chunk_bytes > connection.window_bytes:
                return
            message.left_bytes -= chunk_bytes
            connection.under_way_bytes += chunk_bytes
            connection.num_under_way += 1
            is_last = message.left_bytes <= 0
            if is_last:
                connection.waiting.popleft()
            self._enter(message, 0, chunk_bytes, self._timeline.now_s, is_last)

    def _arrive(self, message: _Message, connection: _Connection, chunk_bytes: float, is_last: bool) -> None:
        connection.under_way_bytes -= chunk_bytes
        connection.num_under_way -= 1
        self._fill(connection)
        connection.idle_since_s = self._timeline.now_s
        if is_last:
            message.action(*message.arguments)


def _first(path: Path) -> Link:
    """The sender's own."""
    first = path[0]
    assert isinstance(first, Link)
    return first


def _pass(link: Link, now_s: float, chunk_bytes: float) -> tuple[float, float]:
    """Take a chunk that comes now; returns when its first byte passes and when its last does, in seconds."""
    start_s = now_s if now_s > link.free_s else link.free_s
    end_s = start_s + chunk_bytes / link.bytes_per_s
    link.free_s = end_s
    if link.burst_s:
        return max(now_s, start_s - link.burst_s), max(now_s, end_s - link.burst_s)
    return start_s, end_s
