"""ZeroMQ sockets of a served run, under CURVE with one key a client: the server's, and a client's."""

import contextlib
import secrets
from collections.abc import Callable
from typing import final

import zmq
import zmq.utils.z85
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from paceline.comm.tickets import Ticket, split_address
from paceline.errors import UsageError
from paceline.messages import FRAME_BYTES, Message, Raw

LARGEST_BYTES = FRAME_BYTES + 4096
"""The largest frame. A peer that announces a larger one is cut off before anything is allocated for it."""
_QUEUE = 16
"""Messages that wait for each client, and from each, at most."""
_HEARTBEAT_MS, _DEAD_MS = 10_000, 30_000
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@final
class _Admission:
    """ZeroMQ asks it about each key that has come."""

    def __init__(self, client_of: Callable[[bytes], int | None]) -> None:
        self._client_of = client_of

    def callback(self, domain: str, key: bytes) -> bool:
        return self._client_of(zmq.utils.z85.encode(key) if len(key) == 32 else key) is not None


@final
class ClientsSocket:
    """The one port that clients connect to. Raises UsageError if it is taken.

    Args:
        keys: the server's, public and secret.
        client_of: which client has a public key; none: nobody.
    """

    def __init__(
        self, keys: tuple[bytes, bytes], *, host: str, port: int, client_of: Callable[[bytes], int | None]
    ) -> None:
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_Admission(client_of))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._socket.linger = 1000
        self._socket.set_hwm(_QUEUE)
        self._socket.maxmsgsize = LARGEST_BYTES
        self._socket.ipv6 = ":" in host
        # A client that connects anew is heard at once, also where its old connection is not known to be dead. Nobody
        # else takes its place, since nobody else knows its identity.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        _keep_alive(self._socket)
        self._monitor = self._socket.get_monitor_socket(_FAILED)
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"cannot listen at {host}:{port}: {error.strerror}; give another --listen") from None

    def receive(self, timeout_s: float) -> tuple[bytes, bytes, list[Raw]] | None:
        """A message's route, the key of whoever sent it, and its frames; none if none has come in time."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        route, *frames = self._socket.recv_multipart(copy=False)
        key = str(frames[0].get("User-Id")) if frames else ""
        return route.bytes, key.encode(), [frame.buffer for frame in frames]

    def send(self, route: bytes, message: Message) -> None:
        """Send a message, unless the client's queue is full: whoever does not read has not asked in earnest."""
        self._socket.send_multipart([route, *message.encode()], copy=not message.payload)

    def num_strangers(self) -> int:
        """Connections that were refused since the last call."""
        count = 0
        while count < _QUEUE and self._monitor.poll(0):
            count += bool(recv_monitor_message(self._monitor)["event"] & _FAILED)
        return count

    def close(self) -> None:
        if not self._context.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._authenticator.stop()
            self._context.term()


@final
class ServerSocket:
    """A client's connection to its server, which it makes itself, and makes again when it is lost."""

    def __init__(self, ticket: Ticket, *, address: str | None = None) -> None:
        host, port = split_address(address or ticket.address)
        keys = ticket.keys
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.identity = secrets.token_bytes(16).replace(b"\0", b"\1")
        self._socket.curve_serverkey = keys.server_public
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.client_public, keys.client_secret
        self._socket.set_hwm(0)
        self._socket.maxmsgsize = LARGEST_BYTES
        self._socket.ipv6 = ":" in host
        _keep_alive(self._socket)
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 200, 5_000
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._socket.connect(f"tcp://{host}:{port}")

    def receive(self, timeout_s: float) -> list[Raw] | None:
        """A message's frames; none if none has come in time."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return [frame.buffer for frame in self._socket.recv_multipart(copy=False)]

    def send(self, message: Message) -> None:
        """Nothing goes where the address is of something else than a server: sending would wait for ever."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(message.encode(), zmq.NOBLOCK, copy=not message.payload)

    def is_refused(self) -> bool:
        """Whether the server has refused this ticket since the last call."""
        refused = False
        while self._monitor.poll(0):
            refused = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH or refused
        return refused

    def close(self, *, linger_s: float = 1.0) -> None:
        """What was sent last has `linger_s` to leave."""
        if not self._context.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close(linger=int(linger_s * 1000))
            self._context.term()


def _keep_alive(socket: "zmq.Socket[bytes]") -> None:
    """Have a connection through NAT stay, and one that is dead be noticed."""
    socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = _HEARTBEAT_MS, _DEAD_MS, _DEAD_MS
    socket.tcp_keepalive = 1
