"""Messages through full-duplex links with bandwidth, latency and queues. Knows no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from paceline.engines.virtual.timeline import Timeline

CHUNK_BYTES = 2**18
"""Small enough for messages of 1 MiB, as parameter servers send them, to share a link."""


@final
@dataclass(slots=True, eq=False)
class Link:
    """One direction of a cable, or a host's memory.

    Senders' own links serve the messages for different hosts in turns, a chunk each, as connections share a network
    card; all others take chunks in the order in which they arrive.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    """From one end to the other."""
    free_s: float = 0.0
    """When the last chunk that was taken will have passed."""
    moved_bytes: float = 0.0
    """Of all chunks taken so far."""
    _flows: dict[int, deque[_Message]] = field(default_factory=dict)
    """Messages that wait at their sender, by the host that they are for."""
    _turns: deque[int] = field(default_factory=deque)
    _is_serving: bool = False

    @property
    def busy_s(self) -> float:
        """For how long data has been passing."""
        return self.moved_bytes / self.bytes_per_s


class Paths(Protocol):
    """Which links a message takes from one host to another, the sender's first; of a host to itself, its memory."""

    def __call__(self, source: int, destination: int) -> Sequence[Link]: ...


@dataclass(slots=True, eq=False)
class _Message:
    path: Sequence[Link]
    left_bytes: float
    action: Callable[..., object]
    arguments: tuple[Any, ...]


@final
class Network:
    """Moves messages among hosts on a timeline.

    A message is cut into chunks, so that messages on the same link pass it interleaved. Chunks cut through: the next
    link begins to pass one on as soon as its head arrives, and cannot be done with it before its tail has. So a lone
    message of M bytes takes its path's latency and M over the least bandwidth, exactly; n messages that meet at one
    receiver take n M over its bandwidth; and a link's two directions do not disturb each other. Queues between links
    are unbounded: a sender is not slowed by a receiver that others keep busy, as each connection has its own window.

    Args:
        timeline: on which chunks move.
        paths: the links between hosts.
        chunk_bytes: of the largest chunk. With infinity messages pass whole, one after the other: less to simulate,
            and links are busy for as long.
    """

    def __init__(self, timeline: Timeline, paths: Paths, *, chunk_bytes: float = CHUNK_BYTES) -> None:
        self._timeline, self._paths, self._chunk_bytes = timeline, paths, chunk_bytes

    def send(
        self, source: int, destination: int, num_bytes: float, action: Callable[..., object], *arguments: Any
    ) -> None:
        """Start now; `action(*arguments)` is called when the last byte has arrived.

        Messages between the same two hosts arrive in the order in which they were sent.
        """
        path = self._paths(source, destination)
        port = path[0]
        flow = port._flows.get(destination)
        message = _Message(path, num_bytes, action, arguments)
        if flow is not None:
            flow.append(message)
            return
        port._flows[destination] = deque((message,))
        port._turns.append(destination)
        if not port._is_serving:
            if port.free_s <= self._timeline.now_s:
                self._serve(port)
            else:
                port._is_serving = True
                self._timeline.at(port.free_s, self._serve, port)

    def _serve(self, port: Link) -> None:
        """The sender's link is free: pass one chunk of the flow whose turn it is."""
        destination = port._turns.popleft()
        flow = port._flows[destination]
        message = flow[0]
        chunk_bytes = min(message.left_bytes, self._chunk_bytes)
        message.left_bytes -= chunk_bytes
        is_last = message.left_bytes <= 0
        if is_last:
            flow.popleft()
        if flow:
            port._turns.append(destination)
        else:
            del port._flows[destination]
        timeline = self._timeline
        now_s = timeline.now_s
        start_s = max(now_s, port.free_s)  # later than now where messages of other paths pass this link, too
        end_s = port.free_s = start_s + chunk_bytes / port.bytes_per_s
        port.moved_bytes += chunk_bytes
        if len(message.path) > 1:
            head_s, tail_s = start_s + port.latency_s, end_s + port.latency_s
            timeline.at(head_s, self._enter, message, 1, chunk_bytes, tail_s, is_last)
        elif is_last:
            timeline.at(end_s + port.latency_s, message.action, *message.arguments)
        port._is_serving = bool(port._turns)
        if port._is_serving:
            timeline.at(end_s, self._serve, port)

    def _enter(self, message: _Message, hop: int, chunk_bytes: float, tail_s: float, is_last: bool) -> None:
        """A chunk's head has come to the link after its first `hop`, and its tail will have at `tail_s`."""
        link = message.path[hop]
        timeline = self._timeline
        start_s = max(timeline.now_s, link.free_s)
        link.free_s = start_s + chunk_bytes / link.bytes_per_s
        link.moved_bytes += chunk_bytes
        end_s = max(link.free_s, tail_s) + link.latency_s
        if hop + 1 < len(message.path):
            timeline.at(start_s + link.latency_s, self._enter, message, hop + 1, chunk_bytes, end_s, is_last)
        elif is_last:
            timeline.at(end_s, message.action, *message.arguments)
