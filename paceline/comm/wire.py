"""ZeroMQ sockets with keys made for one run, over which its messages go.

CURVE encrypts; a peer without the run's client key is refused in the handshake.
"""

from dataclasses import dataclass, field
from typing import final

import zmq
import zmq.auth
import zmq.utils.z85
from zmq.auth.thread import ThreadAuthenticator

from paceline.messages import Message


@dataclass(frozen=True)
class Keys:
    """CURVE key pairs of one run, Z85 text; handed out by the engine, never over these sockets."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> "Keys":
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())


@final
class _OnlyThisRun:
    """Admits the run's client key and no other."""

    def __init__(self, client_public: bytes) -> None:
        self._client_public = client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return zmq.utils.z85.encode(key) == self._client_public if len(key) == 32 else key == self._client_public


@final
class Listener:
    """A ROUTER socket on a free port of `host`, open to the run's clients only. Raises zmq.ZMQError if there is
    none."""

    def __init__(self, keys: Keys, *, host: str) -> None:
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_OnlyThisRun(keys.client_public))
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey = keys.server_public
        self.socket.curve_secretkey = keys.server_secret
        self.socket.linger = 1000
        self.socket.set_hwm(0)  # a router drops what does not fit its queue, and a model may be thousands of messages
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self.socket.ipv6 = ":" in host
        address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        try:
            self.endpoint = f"{address}:{self.socket.bind_to_random_port(address)}"
        except BaseException:
            self.close()
            raise

    def send(self, identity: bytes, message: Message) -> None:
        self.socket.send_multipart([identity, *message.encode()], copy=not message.payload)

    def close(self) -> None:
        if not self._context.closed:
            self.socket.close()
            self._authenticator.stop()
            self._context.term()


@final
class Caller:
    """A DEALER socket connected to a listener of the same run."""

    def __init__(self, keys: Keys, *, endpoint: str, identity: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.identity = identity.encode()
        self.socket.curve_serverkey = keys.server_public
        self.socket.curve_publickey = keys.client_public
        self.socket.curve_secretkey = keys.client_secret
        self.socket.linger = 0
        self.socket.set_hwm(0)
        self.socket.ipv6 = "[" in endpoint
        self.socket.connect(endpoint)

    def send(self, message: Message) -> None:
        self.socket.send_multipart(message.encode(), copy=not message.payload)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close; what was sent has `linger_s` to leave."""
        if not self._context.closed:
            self.socket.close(linger=int(linger_s * 1000))
            self._context.term()
