"""ZeroMQ sockets with keys made for one run, over which its messages go.

CURVE encrypts; a peer without the run's client key is refused in the handshake. What a broken connection loses is sent
again on the next one, which ZeroMQ makes (`delivery.py`).
"""

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import zmq
import zmq.auth
import zmq.utils.z85
from zmq.auth.thread import ThreadAuthenticator

from paceline.comm.delivery import Delivery, opened
from paceline.messages import Message, Raw

AGAIN_S, _MOST_PATIENCE_S = 1.0, 8.0
"""A caller whose connection broke asks to begin again. If it is not answered within the first of these times, it
connects anew: a listener that has not seen the last connection break does not hear the next one. Each time it waits
twice as long, up to the second."""
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""A connection that only one end has seen break is closed on the other after a minute, since nobody else gets in by its
name before. The kernel asks and answers, so that a process that stands still keeps its connections."""


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
        _keep_alive(self.socket)
        self.socket.ipv6 = ":" in host
        self._deliveries: dict[bytes, Delivery] = {}
        address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        try:
            self.endpoint = f"{address}:{self.socket.bind_to_random_port(address)}"
        except BaseException:
            self.close()
            raise

    def receive(self) -> tuple[bytes, list[Raw]] | None:
        """Take what has come: from whom, and a message's frames; none if it was no message. Of what is no word of a
        caller there are no frames."""
        name, *frames = self.socket.recv_multipart(copy=False)
        identity = name.bytes
        envelope, frames = opened(frames)
        if envelope is None:
            return identity, []
        delivery = self._deliveries.get(identity)
        if delivery is None or delivery.life != envelope.life:
            delivery = self._deliveries[identity] = Delivery(envelope.life, calls=False)
        heard = delivery.hear(envelope, frames)
        for said in heard.say:
            self.socket.send_multipart([identity, *said], copy=False)
        return (identity, frames) if heard.is_new else None

    def send(self, identity: bytes, message: Message, *, keep: bool = True) -> None:
        """Send, unless nothing has come from there. `keep`: as of `Delivery.send`."""
        delivery = self._deliveries.get(identity)
        if delivery is not None:
            frames = delivery.send(message.encode(), keep=keep)
            self.socket.send_multipart([identity, *frames], copy=not message.payload)

    def forget(self, identity: bytes) -> None:
        """This caller's process has ended: nothing is kept for it any more. What it has sent before is still heard."""
        if identity in self._deliveries:
            self._deliveries[identity].keep_nothing()

    def close(self) -> None:
        if not self._context.closed:
            self.socket.close()
            self._authenticator.stop()
            self._context.term()


@final
class Caller:
    """A DEALER socket connected to a listener of the same run.

    Args:
        is_anew: another one may have called there by this name, whose end the listener has yet to see. Until then it
            hears nobody else by that name, so that this one calls again until it is answered.
    """

    def __init__(self, keys: Keys, *, endpoint: str, identity: str, is_anew: bool = False) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.identity = identity.encode()
        self.socket.curve_serverkey = keys.server_public
        self.socket.curve_publickey = keys.client_public
        self.socket.curve_secretkey = keys.client_secret
        self.socket.linger = 0
        self.socket.set_hwm(0)
        self.socket.ipv6 = "[" in endpoint
        _keep_alive(self.socket)
        self.broken = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        """Can be read when the connection is broken."""
        self._endpoint = endpoint
        self._delivery = Delivery(secrets.randbits(64), calls=True)
        self._was_broken = False  # and nobody has answered since
        self._asked_s, self._patience_s = 0.0, AGAIN_S
        self.socket.connect(endpoint)
        if is_anew:
            self._was_broken = True
            self._ask()

    @property
    def sockets(self) -> tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]:
        """When one of these can be read, `receive` is to be called."""
        return self.socket, self.broken

    def send(self, message: Message, *, keep: bool = True) -> None:
        """`keep`: as of `Delivery.send`."""
        frames = self._delivery.send(message.encode(), keep=keep)
        if frames:
            self._say(frames, copy=not message.payload)

    def receive(self) -> list[Raw] | None:
        """A message's frames, if one has come. To be called now and then where one is awaited, too: when none has, it
        looks whether the connection is broken."""
        while True:
            try:
                envelope, frames = opened(self.socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                self._mend()
                return None
            if envelope is None or envelope.life != self._delivery.life:
                continue
            heard = self._delivery.hear(envelope, frames)
            self._was_broken = self._was_broken and self._delivery.is_asking
            for said in heard.say:
                self._say(said)
            if heard.is_new:
                return frames

    def settle(self, *, within_s: float) -> bool:
        """Wait until all that was sent is there; whether it is. What comes meanwhile is lost."""
        until_s = time.monotonic() + within_s
        poller = zmq.Poller()
        for each in self.sockets:
            poller.register(each, zmq.POLLIN)
        if not self._delivery.is_settled:
            self._ask()
        while not self._delivery.is_settled and (left_s := until_s - time.monotonic()) > 0:
            poller.poll(int(min(left_s, AGAIN_S) * 1000))
            self.receive()
            if not self._delivery.is_asking and not self._delivery.is_settled:
                self._ask()
        return self._delivery.is_settled

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close; what was sent has `linger_s` to leave."""
        if not self._context.closed:
            self.socket.disable_monitor()
            self.broken.close(linger=0)
            self.socket.close(linger=int(linger_s * 1000))
            self._context.term()

    def _mend(self) -> None:
        is_broken = False
        while self.broken.poll(0):
            self.broken.recv_multipart()
            is_broken = True
        if is_broken:
            self._patience_s = self._patience_s if self._was_broken else AGAIN_S
            self._was_broken = True
            self._ask()
        elif self._was_broken and time.monotonic() > self._asked_s + self._patience_s:
            self._patience_s = min(2 * self._patience_s, _MOST_PATIENCE_S)
            with contextlib.suppress(zmq.ZMQError):  # it is none any more
                self.socket.disconnect(self._endpoint)
            self.socket.connect(self._endpoint)
            self._ask()

    def _ask(self) -> None:
        self._asked_s = time.monotonic()
        self._say(self._delivery.ask())

    def _say(self, frames: Sequence[Raw], *, copy: bool = False) -> None:
        """A listener that has refused the keys, or is none, leaves no way to it: sending would wait for ever."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)


def _keep_alive(socket: "zmq.Socket[bytes]") -> None:
    for option, value in _KEEPALIVE.items():
        socket.setsockopt(option, value)
