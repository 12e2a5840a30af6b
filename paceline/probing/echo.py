"""What answers on a host that is probed: plain TCP, and ZeroMQ as parameter servers have it."""

import socket
import threading
from contextlib import suppress
from typing import final

import torch
import zmq

from paceline.comm.wire import Keys, Listener
from paceline.messages import FRAME_BYTES, Kind, Message, from_frames, raw_bytes

EPOCH = 1
PING_BYTES = 8
_POLL_S = 0.05


@final
class Echo:
    """Two threads on `host`: one sends every 8 bytes back, one takes pieces of parameters as a server does and says
    OK."""

    def __init__(self, keys: Keys, *, host: str) -> None:
        self._is_stopping = False
        self._plain = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._plain.settimeout(_POLL_S)
        self.port: int = self._plain.getsockname()[1]
        self._listener = Listener(keys, host=host)
        self.endpoint = self._listener.endpoint
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._accept, self._serve)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._is_stopping = True
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._plain.close()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_stopping:
            with suppress(TimeoutError, OSError):
                connection, _ = self._plain.accept()
                with connection:
                    connection.settimeout(5.0)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    while ping := connection.recv(PING_BYTES):
                        connection.sendall(ping)

    def _serve(self) -> None:
        place = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        while not self._is_stopping:
            if not self._listener.socket.poll(int(_POLL_S * 1000), zmq.POLLIN):
                continue
            asked = self._listener.receive()
            if asked is None:
                continue
            identity, frames = asked
            message = Message.decode(frames, epoch=EPOCH)
            if message.payload:
                num_bytes = sum(len(raw_bytes(frame)) for frame in message.payload)
                from_frames(message.payload, [place[:num_bytes]])
            self._listener.send(identity, Message(Kind.OK, EPOCH))
