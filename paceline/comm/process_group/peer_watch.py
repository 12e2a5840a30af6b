"""Direct connections between ranks of different hosts that tell who is gone, who is missing and who disagrees.

The backends of torch.distributed say that an operation failed, not because of whom. So every pair of ranks keeps a
TCP connection, silent while all is well. The kernel closes it when a process ends, however it ends, and a rank that has
waited for a while says over it in which operation.
"""

import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from paceline.errors import DeadlineExceeded

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<I{_TOKEN_BYTES}s")
_HEADER = struct.Struct("<BQH")  # kind, number of the call, length of the text
_CALL, _LEAVE, _STAND = 0, 1, 2
_ADDRESS = struct.Struct(f"<40sH{_TOKEN_BYTES}s")
ADDRESS_BYTES = _ADDRESS.size
_MAX_TEXT_BYTES = 2000
_MEET_WITHIN_S = 60.0
# A host that vanishes is noticed after 5 s + 3 * 5 s.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


@final
@dataclass
class Peer:
    connection: socket.socket
    last_call: int = 0
    """Number of the last operation that it said it takes part in; 0 before it said so."""
    calls: dict[int, str] = field(default_factory=dict)
    """What it said that those operations are, by number; whoever has read an entry may delete it."""
    stands_at: int = 0
    """Number of the operation that it said it does nothing else before; 0 before it said so."""
    num_sent: int = 0
    """Messages that it had sent to this rank when it said so."""
    departure: str | None = None
    """Why it takes part in nothing any more, once that is known."""
    num_completed: int = 0
    """Operations that it had completed when it left, as far as it said."""
    unread: bytearray = field(default_factory=bytearray)
    is_deaf: bool = False
    """It has not read what it was told for so long that nothing more can be sent."""


@final
class PeerWatch:
    """One rank's connections to all others. Only `wait` and `meet` block."""

    def __init__(self, rank: int, peers: Mapping[int, Peer]) -> None:
        self.rank = rank
        self.peers = peers

    @classmethod
    def meet(
        cls,
        exchange: Callable[[bytes], Sequence[bytes]],
        *,
        rank: int,
        address: str,
        deadline_s: float | None,
        names: Sequence[int] | None = None,
    ) -> "PeerWatch":
        """Connect to all other ranks. Collective call.

        Args:
            exchange: an all-gather of ADDRESS_BYTES bytes a rank. Only who took part in it can connect.
            address: IP address of this host on which the others reach it.
            names: what the ranks are called from here on, where that is not their numbers.

        Raises:
            DeadlineExceeded: not all others have connected in time.
            OSError: another rank's address cannot be reached.
        """
        until_s = time.monotonic() + (_MEET_WITHIN_S if deadline_s is None else deadline_s)
        token = secrets.token_bytes(_TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=1024) as listener:
            port = listener.getsockname()[1]
            rows = [_ADDRESS.unpack(row) for row in exchange(_ADDRESS.pack(address.encode(), port, token))]
            connections = {}
            for other, (host, their_port, their_token) in enumerate(rows[:rank]):
                left_s = max(until_s - time.monotonic(), 0.001)
                connection = socket.create_connection((host.rstrip(b"\0").decode(), their_port), timeout=left_s)
                connection.sendall(_HELLO.pack(rank, their_token))
                connections[other] = connection
            others = set(range(rank + 1, len(rows)))
            while others:
                other, connection = _accept(listener, token, others, until_s)
                connections[other] = connection
                others.remove(other)
        for connection in connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
        names = names or range(len(rows))
        return cls(names[rank], {names[other]: Peer(connections[other]) for other in sorted(connections)})

    def tell(self, call: int, text: str) -> None:
        """Say to all others that this rank takes part in operation number `call`, and what it is."""
        self._send(_CALL, call, text)

    def stand(self, call: int, text: str, num_sent: Mapping[int, int]) -> None:
        """As `tell`, and that this rank does nothing else before the operation is over.

        Args:
            num_sent: messages that it has sent to each rank so far.
        """
        self.tell(call, text)
        for rank, peer in self.peers.items():
            self._send_to(peer, _STAND, call, str(num_sent.get(rank, 0)))

    def leave(self, num_completed: int, reason: str) -> None:
        """Say to all others that this rank takes part in nothing after that many operations."""
        self._send(_LEAVE, num_completed, reason)

    def look(self) -> None:
        for peer in self.peers.values():
            if peer.departure is None:
                _read(peer)

    def wait(self, timeout_s: float) -> None:
        """Block until another rank says something, but no longer than that."""
        poll = select.poll()
        for peer in self.peers.values():
            if peer.departure is None:
                poll.register(peer.connection, select.POLLIN)
        poll.poll(1000 * timeout_s)

    def missing(self, call: int) -> list[int]:
        """The ranks that have not said that they take part in operation number `call` or a later one."""
        return [rank for rank, peer in self.peers.items() if peer.last_call < call]

    def close(self) -> None:
        """Leave without a word, if none was said before. A second call does nothing."""
        for peer in self.peers.values():
            peer.connection.close()
        self.peers = {}

    def _send(self, kind: int, call: int, text: str) -> None:
        for peer in self.peers.values():
            self._send_to(peer, kind, call, text)

    def _send_to(self, peer: Peer, kind: int, call: int, text: str) -> None:
        raw = text.encode()[:_MAX_TEXT_BYTES]
        if peer.departure is None and not peer.is_deaf:
            try:
                peer.connection.sendall(_HEADER.pack(kind, call, len(raw)) + raw)
            except BlockingIOError:
                peer.is_deaf = True
            except OSError:
                pass  # it is gone, which reading will tell


def _read(peer: Peer) -> None:
    try:
        while chunk := peer.connection.recv(65536):
            peer.unread += chunk
            _parse(peer)
    except BlockingIOError:
        return
    except OSError as error:
        peer.departure = peer.departure or f"its connection broke: {error.strerror}"
    else:
        peer.departure = peer.departure or "its process ended, or it closed its collective"


def _parse(peer: Peer) -> None:
    while len(peer.unread) >= _HEADER.size:
        kind, call, length = _HEADER.unpack_from(peer.unread)
        stop = _HEADER.size + length
        if len(peer.unread) < stop:
            return
        text = bytes(peer.unread[_HEADER.size : stop]).decode(errors="replace")
        del peer.unread[:stop]
        if kind == _CALL:
            peer.calls[call] = text
            peer.last_call = max(call, peer.last_call)
        elif kind == _STAND:
            peer.stands_at, peer.num_sent = call, int(text)
        else:
            peer.departure, peer.num_completed = f"it left ({text})", call


def _accept(listener: socket.socket, token: bytes, others: set[int], until_s: float) -> tuple[int, socket.socket]:
    """The next of the others that connects, and its connection."""
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"rank {min(others)} has not connected in time")
        listener.settimeout(left_s)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        try:
            connection.settimeout(min(left_s, 5.0))
            rank, theirs = _HELLO.unpack(_receive(connection, _HELLO.size))
            if secrets.compare_digest(theirs, token) and rank in others:
                return rank, connection
        except (OSError, struct.error):
            pass
        connection.close()  # somebody else, such as a port scanner


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    raw = b""
    while len(raw) < num_bytes and (chunk := connection.recv(num_bytes - len(raw))):
        raw += chunk
    return raw
