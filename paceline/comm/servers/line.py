"""A line between a worker and a server on one host: message bytes in shared memory, and a bell that wakes the other.

Not through ZeroMQ, whose own threads compete with the workers for the cores.
"""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from paceline.comm.servers.payload import ReceivedPayload, SentPayload
from paceline.comm.shared_memory import futex
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.comm.shared_memory.descriptors import open_descriptor
from paceline.errors import PeerLost
from paceline.messages import Raw

_REQUESTED, _REQUEST_BYTES, _ANSWERED, _ANSWER_BYTES = 0, 1, 16, 17  # 32-bit words, one cache line for each side
_WORDS = 32
_CAPACITY_BYTES = 32 * 1024 - 4 * _WORDS
_REQUEST_START = 4 * _WORDS
_ANSWER_START = _REQUEST_START + _CAPACITY_BYTES
LINE_BYTES = _ANSWER_START + _CAPACITY_BYTES
_MASK = 2**32 - 1


_REQUEST_PAYLOAD, _ANSWER_PAYLOAD = 1, 9  # 64-bit words, on the same cache lines, which say where tensors are


@dataclass(frozen=True)
class BellAddress:
    """Where another process of the same host finds a bell."""

    pid: int
    fd: int
    inode: int
    """The number of the pipe, by which whoever opens it knows that it is the right one."""


@final
class Bell:
    """A pipe that a server waits on beside its sockets; what comes through says only that there is something to see."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.address = BellAddress(os.getpid(), self._write_fd, os.fstat(self._write_fd).st_ino)

    def ring(self) -> None:
        """Wakes the server, as a worker does. Any thread may call it; it does nothing once the bell is closed."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._is_closed:
                os.write(self._write_fd, b"\1")

    def silence(self) -> None:
        """Forget the rings so far; to be called before looking for what they announced."""
        try:
            while len(os.read(self.fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.fd)
            os.close(self._write_fd)


@final
class WorkerLine:
    """The worker's end: one request at a time."""

    def __init__(self, bell: BellAddress, *, yield_s: float = 0.0) -> None:
        """Find the server's bell.

        Args:
            yield_s: how long a wait for an answer offers its core to others before it sleeps.

        Raises:
            PeerLost: the server is gone.
        """
        self._yield_s = yield_s
        self._segment = SharedBlock.create(LINE_BYTES)
        self.address = self._segment.address
        self._words = self._segment.buffer[: 4 * _WORDS].cast("I")
        numbers = self._segment.buffer[: 4 * _WORDS].cast("q")
        self._sent = SentPayload(numbers[_REQUEST_PAYLOAD:])
        self._received = ReceivedPayload(numbers[_ANSWER_PAYLOAD:])
        self._answered_address = self._segment.tensor.data_ptr() + 4 * _ANSWERED
        self._number = 0
        self.is_answered = False
        """The answer to the last request has been received: no other comes."""
        flags = os.O_WRONLY | os.O_NONBLOCK
        self._bell_fd = open_descriptor(bell.pid, bell.fd, link=f"pipe:[{bell.inode}]", flags=flags)

    def send(self, frames: Sequence[Raw]) -> bool:
        """Make a request: header, body, and tensors in frames, which may be of any size; false, and nothing done, if
        the body is too large for a line."""
        raw = _join(frames)
        if len(raw) > _CAPACITY_BYTES:
            return False
        self._sent.write(frames[2:])
        self._number, self.is_answered = (self._number + 1) & _MASK, False
        self._segment.buffer[_REQUEST_START : _REQUEST_START + len(raw)] = raw
        self._words[_REQUEST_BYTES] = len(raw)
        futex.fence()
        self._words[_REQUESTED] = self._number
        try:
            os.write(self._bell_fd, b"\1")
        except BlockingIOError:
            pass  # so many rings are unheard that one more says nothing new
        except BrokenPipeError:
            raise PeerLost("the server is gone") from None
        return True

    def receive(self, *, timeout_s: float) -> list[Raw] | None:
        """The answer to the last request, whose tensors are one frame that stays as it is until the next request; none
        if it has not come in time. Raises PeerLost if the server has gone with them."""
        until_s = time.perf_counter() + min(self._yield_s, timeout_s)
        while self._words[_ANSWERED] != self._number and time.perf_counter() < until_s:
            os.sched_yield()
        seen = self._words[_ANSWERED]
        if seen != self._number:
            futex.wait(self._answered_address, seen, timeout_s)
            if self._words[_ANSWERED] != self._number:
                return None
        futex.fence()
        self.is_answered = True
        head = _split(self._segment.buffer[_ANSWER_START : _ANSWER_START + self._words[_ANSWER_BYTES]])
        return head + self._received.read()

    def close(self) -> None:
        os.close(self._bell_fd)
        self._sent.close()
        self._received.close()
        self._words.release()
        self._segment.close()


@final
class ServerLine:
    """The server's end."""

    def __init__(self, address: BlockAddress) -> None:
        self._segment = SharedBlock.open(address)
        self._words = self._segment.buffer[: 4 * _WORDS].cast("I")
        numbers = self._segment.buffer[: 4 * _WORDS].cast("q")
        self._sent = SentPayload(numbers[_ANSWER_PAYLOAD:])
        self._received = ReceivedPayload(numbers[_REQUEST_PAYLOAD:])
        self._answered_address = self._segment.tensor.data_ptr() + 4 * _ANSWERED
        self._number = self._words[_REQUESTED]

    def receive(self) -> list[Raw] | None:
        """The request that has come since the last one, whose tensors are one frame that stays as it is until the
        answer; none if none has. Raises PeerLost if they cannot be had: the request is to be answered by an error."""
        number = self._words[_REQUESTED]
        if number == self._number:
            return None
        futex.fence()
        self._number = number
        head = _split(self._segment.buffer[_REQUEST_START : _REQUEST_START + self._words[_REQUEST_BYTES]])
        return head + self._received.read()

    def send(self, frames: Sequence[Raw]) -> None:
        """Answer the last request. Raises ValueError if the answer's body is too large for a line."""
        raw = _join(frames)
        if len(raw) > _CAPACITY_BYTES:
            raise ValueError(f"an answer of {len(raw)} bytes does not fit the line's {_CAPACITY_BYTES}")
        self._sent.write(frames[2:])
        self._segment.buffer[_ANSWER_START : _ANSWER_START + len(raw)] = raw
        self._words[_ANSWER_BYTES] = len(raw)
        futex.fence()
        self._words[_ANSWERED] = self._number
        futex.wake(self._answered_address)

    def close(self) -> None:
        self._sent.close()
        self._received.close()
        self._words.release()
        self._segment.close()


def _join(frames: Sequence[Raw]) -> bytes:
    """A header of known length needs no frame lengths: the first frame's length stands before all."""
    header, body = frames[:2]
    return b"".join((len(header).to_bytes(2, "little"), header, body))


def _split(raw: memoryview) -> list[Raw]:
    header_bytes = int.from_bytes(raw[:2], "little")
    return [bytes(raw[2 : 2 + header_bytes]), bytes(raw[2 + header_bytes :])]
