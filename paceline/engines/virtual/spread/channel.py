"""Frames of bytes between the simulation and a crew."""

from __future__ import annotations

import select
import socket
import struct
from typing import final

_HEADER = struct.Struct("<IQ")
_READ_BYTES = 1 << 20


@final
class Channel:
    """One end of a connected stream socket, which this takes over.

    Sending never waits: what the socket does not take leaves while this end waits for something to arrive. So two ends
    that both have much to say do not wait for each other.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._poll = select.poll()  # select.select knows no descriptors above 1023
        self._poll.register(self._socket, select.POLLIN)
        self._leaving = bytearray()
        self._arrived = bytearray()

    def send(self, number: int, content: bytes) -> None:
        """Send a frame.

        Args:
            number: below 2**32; of the worker that it is about, or a sign of what it is (`turns.py`).

        Raises:
            EOFError: the other end is gone.
        """
        self._leaving += _HEADER.pack(number, len(content))
        self._leaving += content
        self._let_leave()

    def receive(self) -> tuple[int, bytes]:
        """The next frame; waits for it.

        Raises:
            EOFError: the other end is gone.
        """
        while (frame := self.poll()) is None:
            self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._leaving else 0))
            self._poll.poll()
            self._let_leave()
        return frame

    def poll(self) -> tuple[int, bytes] | None:
        """The next frame, if one is here.

        Raises:
            EOFError: the other end is gone.
        """
        self._let_leave()
        while (frame := self._next_frame()) is None and self._has_arrived():
            pass
        return frame

    def close(self) -> None:
        self._socket.close()

    def _next_frame(self) -> tuple[int, bytes] | None:
        arrived = self._arrived
        if len(arrived) < _HEADER.size:
            return None
        number, num_bytes = _HEADER.unpack_from(arrived)
        end = _HEADER.size + num_bytes
        if len(arrived) < end:
            return None
        content = bytes(memoryview(arrived)[_HEADER.size : end])
        del arrived[:end]
        return number, content

    def _has_arrived(self) -> bool:
        """Take what the socket has; false: it has nothing."""
        try:
            content = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError:
            content = b""
        if not content:
            raise EOFError("the other end is gone")
        self._arrived += content
        return True

    def _let_leave(self) -> None:
        try:
            while self._leaving:
                num_sent = self._socket.send(self._leaving)
                del self._leaving[:num_sent]
        except BlockingIOError:
            pass
        except ConnectionError:
            raise EOFError("the other end is gone") from None
