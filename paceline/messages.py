"""The typed messages of a run. Every one is a fixed header, a JSON body (often empty) and raw frames of tensor bytes.

Nothing is ever unpickled.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from paceline.errors import PacelineError

FRAME_BYTES = 1 << 20
ALL_SHARDS = -1
VOID, STOP, ADMITTED, IN_TURN = 1, 2, 4, 8  # flags of EXCHANGE and ANSWER
APART = 16  # of ATTACH: no server is on this worker's host
HOLD = 32  # of EXCHANGE: other servers are to have it, too, before it counts
UNCODED = 128  # of EXCHANGE: tensors are as they are, whatever codec others come through
MORE = 64  # of REPLICATE: the next entry is of the same change
HEAD_BYTES = 256
"""Bytes that a message takes besides its tensors: header, body, and what a network puts around them."""
_HEADER = struct.Struct("<2sBBIIiqqqqqd")
_MAGIC = b"P1"


Raw: TypeAlias = Any
"""What a frame may be: whatever has a memory to look at, such as bytes and what a socket received."""


class WireError(PacelineError):
    """Bytes arrived that are no message of this run."""


class Kind(IntEnum):
    """What a message is about: requests to servers, their answers, then what members and the launcher exchange."""

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
    JOIN = 11
    UPDATE = 12
    REPLICATE = 13
    REPLICATED = 14
    HELD = 15
    ANSWER = 16
    OK = 17
    ERROR = 18
    COUNT = 19
    OPEN_TABLES = 20
    READ_ROWS = 21
    PUSH_ROWS = 22
    GET_ROWS = 23
    SET_ROWS = 24
    SAVE_ROWS = 25
    LOAD_ROWS = 26
    SHOW_ROWS = 27
    CHANGED_ROWS = 28
    STEP_ASIDE = 29
    COME_BACK = 30
    READ_AHEAD = 31
    RECORDS = 32
    PULSE = 33
    FILE = 34
    OUTPUT = 35
    LOAD = 36
    GOODBYE = 37
    STORE = 38
    MAIL = 39
    REPORT = 40
    GIFT = 41
    TAKE = 42
    RETIRED = 43
    RESULT = 44
    PIECE = 45
    ENDS = 46
    LANE = 47
    STOP = 48
    ABORT = 49
    FILE_WRITTEN = 50
    CONTENT = 51
    STORED = 52
    FORM = 53
    STATE = 54
    GIVE = 55
    RETIRE = 56
    TURN = 57
    CHAIN = 58
    SERVES = 59
    LOST = 60
    LEASE = 61
    LANES = 62
    SECRETS = 63
    INIT_VALUES = 64
    PUSH_VALUES = 65
    PULL_VALUES = 66
    READ_CLOCKS = 67
    MEET = 68
    COPIED = 69
    HANDED_OVER = 70
    HOW_FAR = 71


ABOUT_ROWS = frozenset({Kind.READ_ROWS, Kind.READ_AHEAD, Kind.PUSH_ROWS, Kind.CHANGED_ROWS})
"""What workers ask servers about rows in a step."""
_KINDS = {kind.value: kind for kind in Kind}  # quicker than `Kind(number)` by 0.4 microseconds


@dataclass(slots=True)
class Message:
    """One message. The numbers mean what their names say, for the kinds that use them.

    Not frozen, which would take 2 microseconds more to make one; an exchange makes four.
    """

    kind: Kind
    epoch: int
    """Membership epoch of the sender; a message of another epoch is refused."""
    sender: int = 0
    flags: int = 0
    shard: int = ALL_SHARDS
    """The server's shard that the tensors are for, or come from."""
    clock: int = 0
    iteration: int = 0
    pause_at: int = 0
    staleness: int = 0
    tensor_bytes: int = 0
    """Bytes of the tensors that come with the message, in its payload or in memory that both ends reach."""
    waiting_s: float = 0.0
    body: Mapping[str, Any] = field(default_factory=dict)
    payload: Sequence[Raw] = ()

    @property
    def num_bytes(self) -> int:
        """How many bytes the message moves between the two ends."""
        return HEAD_BYTES + self.tensor_bytes

    def encode(self) -> list[Raw]:
        """The frames to send: header, body, payload."""
        return [*self.encode_head(), *self.payload]

    def encode_head(self) -> list[bytes]:
        """Header and body alone."""
        header = _HEADER.pack(
            _MAGIC,
            self.kind,
            self.flags,
            self.epoch,
            self.sender,
            self.shard,
            self.clock,
            self.iteration,
            self.pause_at,
            self.staleness,
            self.tensor_bytes,
            self.waiting_s,
        )
        return [header, json.dumps(self.body).encode() if self.body else b""]

    @classmethod
    def decode(cls, frames: Sequence[Raw], *, epoch: int | None) -> "Message":
        """Read a message of this epoch; none: of any. Raises WireError if it is none, or of another epoch."""
        try:
            header, text = raw_bytes(frames[0]), raw_bytes(frames[1])
            numbers = _HEADER.unpack(header)
            magic, kind, flags, theirs, sender, shard, clock, iteration, pause_at, staleness, size, waiting_s = numbers
            body = json.loads(bytes(text)) if len(text) else {}
            if magic != _MAGIC or not isinstance(body, dict):
                raise ValueError("no Paceline message")
            counts = (clock, iteration, pause_at, staleness, size)
            message = cls(_KINDS[kind], theirs, sender, flags, shard, *counts, waiting_s, body, frames[2:])
        except (LookupError, ValueError, RecursionError, struct.error) as error:
            raise WireError(f"refused a malformed message: {error}") from None
        if epoch is not None and theirs != epoch:
            raise WireError(f"refused a message of membership epoch {theirs}; this is epoch {epoch}")
        return message


def cut_into_frames(content: bytes | memoryview) -> list[memoryview]:
    """Bytes as frames of at most `FRAME_BYTES`, without a copy."""
    view = memoryview(content)
    return [view[start : start + FRAME_BYTES] for start in range(0, len(view), FRAME_BYTES)]


def to_frames(tensors: Sequence[Tensor]) -> list[memoryview]:
    """Contiguous CPU tensors as raw frames of at most `FRAME_BYTES`, without a copy."""
    return [frame for tensor in tensors for frame in cut_into_frames(as_bytes(tensor))]


def from_frames(frames: Sequence[Raw], tensors: Sequence[Tensor]) -> None:
    """Copy raw frames into tensors. Raises WireError if they hold another number of bytes."""
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


def cut_for(frames: Sequence[Raw], tensors: Sequence[Tensor]) -> Sequence[Raw]:
    """Where one frame has all bytes, as on a line, a frame for each of the tensors, and one of the rest."""
    if len(frames) != 1:
        return frames
    parts, rest = [], raw_bytes(frames[0])
    for tensor in tensors:
        parts.append(rest[: tensor.nbytes])
        rest = rest[tensor.nbytes :]
    return [*parts, rest]


def split_frames(frames: Sequence[Raw], num_bytes: int) -> tuple[Sequence[Raw], Sequence[Raw]]:
    """The first frames, with so many bytes, and all others. Raises WireError if no frame ends there."""
    count = 0
    while num_bytes > 0 and count < len(frames):
        num_bytes -= len(raw_bytes(frames[count]))
        count += 1
    if num_bytes:
        raise WireError("a message's frames do not end where its tensors do")
    return frames[:count], frames[count:]


def raw_bytes(frame: Raw) -> memoryview:
    """A frame's bytes, not copied."""
    return memoryview(frame)


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor. Raises ValueError if the tensor is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} must be contiguous to be sent or received raw")
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(cast(Any, flat.numpy())).cast("B")
