"""ZeroMQ sockets with keys made for one run, and the typed messages that cross them.

Every message is a fixed header, a JSON body (often empty) and raw frames of tensor bytes. Nothing is ever unpickled.
CURVE encrypts; a peer without the run's client key is refused in the handshake.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, cast, final

import torch
import zmq
import zmq.auth
import zmq.utils.z85
from torch import Tensor
from zmq.auth.thread import ThreadAuthenticator

from paceline.errors import PacelineError

FRAME_BYTES = 1 << 20
ALL_SHARDS = -1
VOID, STOP, ADMITTED, IN_TURN = 1, 2, 4, 8  # flags of EXCHANGE and ANSWER
APART = 16  # of ATTACH: no server is on this worker's host
_HEADER = struct.Struct("<2sBIIBiqqqqd")
_MAGIC = b"P1"


Raw = bytes | memoryview | zmq.Frame
"""What a frame may be."""


class WireError(PacelineError):
    """Bytes arrived that are no message of this run."""


class Kind(IntEnum):
    """What a message is about. Requests to servers, their answers, then what members and the launcher exchange."""

    ATTACH = 1
    INITIALISE = 2
    EXCHANGE = 3
    WAIT = 4
    PULL = 5
    LEAVE = 6
    GET_STATE = 7
    SET_STATE = 8
    FOLLOW = 9
    RECEIVED = 10
    ANSWER = 16
    OK = 17
    ERROR = 18
    RECORDS = 32
    PULSE = 33
    FILE = 34
    OUTPUT = 35
    LOAD = 36
    GOODBYE = 37
    STOP = 48
    ABORT = 49
    FILE_WRITTEN = 50
    CONTENT = 51


@dataclass
class Message:
    """One message; which of the numbers count depends on its kind.

    Not frozen: making one would take 2 us more, and an exchange makes four.
    """

    kind: Kind
    epoch: int
    """Membership epoch of the sender; a message of another epoch is refused."""
    sender: int = 0
    flags: int = 0
    shard: int = ALL_SHARDS
    """Which of a server's shards the tensors are for, or of."""
    clock: int = 0
    iteration: int = 0
    pause_at: int = 0
    staleness: int = 0
    waiting_s: float = 0.0
    body: Mapping[str, Any] = field(default_factory=dict)
    payload: Sequence[Raw] = ()

    def encode(self) -> list[Raw]:
        """The frames to send: header, body, payload."""
        return [*self.encode_head(), *self.payload]

    def encode_head(self) -> list[bytes]:
        who = (self.kind, self.epoch, self.sender, self.flags, self.shard)
        counts = (self.clock, self.iteration, self.pause_at, self.staleness, self.waiting_s)
        return [_HEADER.pack(_MAGIC, *who, *counts), json.dumps(self.body).encode() if self.body else b""]

    @classmethod
    def decode(cls, frames: Sequence[Raw], *, epoch: int) -> Message:
        """Read a message of this epoch.

        Raises:
            WireError: it is none, or of another epoch.
        """
        try:
            header, text = raw_bytes(frames[0]), raw_bytes(frames[1])
            magic, kind, *numbers = _HEADER.unpack(header)
            body = json.loads(bytes(text)) if len(text) else {}
            if magic != _MAGIC or not isinstance(body, dict):
                raise ValueError("no Paceline message")
            message = cls(Kind(kind), *numbers)
            message.body, message.payload = body, frames[2:]
        except (IndexError, ValueError, RecursionError, struct.error) as error:
            raise WireError(f"refused a malformed message: {error}") from None
        if message.epoch != epoch:
            raise WireError(f"refused a message of membership epoch {message.epoch}; this is epoch {epoch}")
        return message


@dataclass(frozen=True)
class Keys:
    """CURVE key pairs of one run, Z85 text; handed out by the engine, never over these sockets."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> Keys:
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
    """A ROUTER socket on a free port of `host`, open to the run's clients only.

    Raises:
        zmq.ZMQError: this machine has no such address, or no port free.
    """

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


def cut_into_frames(content: bytes | memoryview) -> list[memoryview]:
    """Bytes as frames of at most `FRAME_BYTES`, without a copy."""
    view = memoryview(content)
    return [view[start : start + FRAME_BYTES] for start in range(0, len(view), FRAME_BYTES)]


def to_frames(tensors: Sequence[Tensor]) -> list[memoryview]:
    """Contiguous CPU tensors as raw frames of at most `FRAME_BYTES`, without a copy."""
    return [frame for tensor in tensors for frame in cut_into_frames(as_bytes(tensor))]


def from_frames(frames: Sequence[Raw], tensors: Sequence[Tensor]) -> None:
    """Copy raw frames into the tensors that `to_frames` was given the like of.

    Raises:
        WireError: the frames hold another number of bytes.
    """
    raws = [raw_bytes(frame) for frame in frames]
    expected = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    if sum(len(raw) for raw in raws) != expected:
        raise WireError(f"a message carries {sum(len(raw) for raw in raws)} bytes of tensors instead of {expected}")
    queue = iter(raws)
    for tensor in tensors:
        target = as_bytes(tensor)
        start = 0
        while start < len(target):
            raw = next(queue)
            if start + len(raw) > len(target):
                raise WireError("a message is cut into frames that cross tensors")
            target[start : start + len(raw)] = raw
            start += len(raw)


def raw_bytes(frame: Raw) -> memoryview:
    """A frame's bytes, not copied."""
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor.

    Raises:
        ValueError: the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} must be contiguous to be sent or received raw")
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(cast(Any, flat.numpy())).cast("B")
