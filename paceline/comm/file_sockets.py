"""A file of one process that another host's processes copy over the run's encrypted sockets."""

import errno
import os
import threading
from collections.abc import Sequence
from typing import final

import zmq

from paceline.comm.wire import Caller, Keys, Listener
from paceline.errors import PeerLost
from paceline.messages import FRAME_BYTES, Kind, Message, Raw, WireError, raw_bytes

_LOOK_S = 0.1
_UNDER_WAY = 8  # pieces of 1 MiB: what a link of 1 Gbit/s carries in 67 ms


@final
class OfferedFile:
    """A thread that answers whoever asks for pieces of the file, until it is withdrawn.

    Args:
        descriptor: of the file, which has its size; another one is made of it.
        host: the address to listen on.
        epoch: what messages carry; those of another are refused.
    """

    def __init__(self, descriptor: int, keys: Keys, *, host: str, epoch: int) -> None:
        self._listener = Listener(keys, host=host)
        self._descriptor, self._epoch = os.dup(descriptor), epoch
        self.endpoint = self._listener.endpoint
        self._is_withdrawn = threading.Event()
        threading.Thread(target=self._serve, name="paceline-file", daemon=True).start()

    def withdraw(self) -> None:
        """Returns at once; the thread ends soon afterwards."""
        self._is_withdrawn.set()

    def _serve(self) -> None:
        try:
            while not self._is_withdrawn.is_set():
                if self._listener.socket.poll(int(_LOOK_S * 1000)):
                    asked = self._listener.receive()
                    if asked is not None:
                        self._answer(*asked)
        finally:
            self._listener.close()
            os.close(self._descriptor)

    def _answer(self, identity: bytes, frames: Sequence[Raw]) -> None:
        try:
            message = Message.decode(frames, epoch=self._epoch)
        except WireError:
            return
        if message.kind is Kind.PIECE and message.clock >= 0:
            piece = os.pread(self._descriptor, FRAME_BYTES, message.clock)
            self._listener.send(identity, Message(Kind.PIECE, self._epoch, clock=message.clock, payload=[piece]))


def copy_file(
    descriptor: int, keys: Keys, *, endpoint: str, num_bytes: int, identity: str, epoch: int, patience_s: float
) -> None:
    """Fill an empty file with what a process offers.

    Raises:
        PeerLost: the process has ended, nothing comes for `patience_s`, or what comes is no piece of the file.
    """
    caller = Caller(keys, endpoint=endpoint, identity=identity)
    poller = zmq.Poller()
    for socket in caller.sockets:
        poller.register(socket, zmq.POLLIN)
    try:
        wanted = list(range(0, num_bytes, FRAME_BYTES))[::-1]
        missing = set(wanted)
        under_way = 0
        while missing:
            while wanted and under_way < _UNDER_WAY:
                caller.send(Message(Kind.PIECE, epoch, clock=wanted.pop()))
                under_way += 1
            ready = dict(poller.poll(int(patience_s * 1000)))
            if caller.socket not in ready:
                raise PeerLost(f"whoever offers a file at {endpoint} has ended, or does not answer")
            frames = caller.receive()
            if frames is None:
                continue
            message = Message.decode(frames, epoch=epoch)
            piece = b"".join(raw_bytes(frame) for frame in message.payload)
            is_wanted = message.kind is Kind.PIECE and message.clock in missing
            if not is_wanted or len(piece) != min(FRAME_BYTES, num_bytes - message.clock):
                raise PeerLost(f"whoever offers a file at {endpoint} sends what is no piece of it")
            if os.pwrite(descriptor, piece, message.clock) != len(piece):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            missing.discard(message.clock)
            under_way -= 1
    finally:
        caller.close()
