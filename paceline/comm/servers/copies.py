"""A server's connections to those that hold the next copy of what it has."""

import functools
from collections.abc import Mapping
from typing import final

import zmq

from paceline.comm.wire import Caller, Keys
from paceline.messages import Message


@final
class NextCopies:
    """One connection a key range, opened when there is something to say.

    Args:
        server: which one of the group this is.
        poller: told of their sockets.
    """

    def __init__(self, keys: Keys, *, server: int, poller: zmq.Poller) -> None:
        self.endpoints: Mapping[int, str] = {}
        """Where each server listens."""
        self._keys, self._server, self._poller = keys, server, poller
        self._callers: dict[int, tuple[int, Caller]] = {}  # by key range, and to which server

    def send(self, key_range: int, to: int, message: Message) -> None:
        """The last server it was sent to is no longer spoken to, if that was another one."""
        if key_range not in self._callers or self._callers[key_range][0] != to:
            self._close(key_range)
            identity = identity_of_server(self._server, key_range).decode()
            caller = Caller(self._keys, endpoint=self.endpoints[to], identity=identity)
            self._poller.register(caller.socket, zmq.POLLIN)
            self._callers[key_range] = to, caller
        self._callers[key_range][1].send(message)

    def about(self, socket: zmq.Socket[bytes]) -> tuple[int, int]:
        """The key range that this socket is for, and the server at its other end."""
        return next((key_range, to) for key_range, (to, caller) in self._callers.items() if caller.socket is socket)

    def close(self) -> None:
        for key_range in list(self._callers):
            self._close(key_range)

    def _close(self, key_range: int) -> None:
        if key_range in self._callers:
            _, caller = self._callers.pop(key_range)
            self._poller.unregister(caller.socket)
            caller.close()


@functools.lru_cache
def identity_of_server(server: int, key_range: int) -> bytes:
    """A server's name on the socket of the next one of that key range's chain."""
    return f"server-{server}@{key_range}".encode()
