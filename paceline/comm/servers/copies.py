"""A server's connections to those that hold the next copy of what it has."""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple, final

import zmq

from paceline.comm.wire import Caller, Keys
from paceline.messages import Message, Raw


class _Way(NamedTuple):
    to: int
    """A server."""
    caller: Caller


@final
class NextCopies:
    """One connection a key range, opened when there is something to say.

    Args:
        server: which one of the group this is.
        poller: told of their sockets.
    """

    def __init__(self, keys: Keys, *, server: int, poller: zmq.Poller) -> None:
        self.endpoints: dict[int, str] = {}
        """Where each server listens."""
        self._keys, self._server, self._poller = keys, server, poller
        self._ways: dict[int, _Way] = {}  # by key range
        self._called: set[tuple[int, int]] = set()  # of which key range, and which server

    def send(self, key_range: int, to: int, message: Message) -> None:
        """The last server it was sent to is no longer spoken to, if that was another one."""
        if key_range not in self._ways or self._ways[key_range].to != to:
            self.leave(key_range)
            identity = identity_of_server(self._server, key_range).decode()
            is_anew = (key_range, to) in self._called
            self._called.add((key_range, to))
            caller = Caller(self._keys, endpoint=self.endpoints[to], identity=identity, is_anew=is_anew)
            for socket in caller.sockets:
                self._poller.register(socket, zmq.POLLIN)
            self._ways[key_range] = _Way(to, caller)
        self._ways[key_range].caller.send(message)

    def receive(self) -> Iterator[tuple[int, int, list[Raw]]]:
        """What has come: a key range, the server that has its next copy, and a message. To be called now and then where
        nothing has, too (`Caller.receive`)."""
        for key_range, way in list(self._ways.items()):
            # What came before may have had this server leave that one.
            while self._ways.get(key_range) is way and (frames := way.caller.receive()) is not None:
                yield key_range, way.to, frames

    def close(self) -> None:
        for key_range in list(self._ways):
            self.leave(key_range)

    def leave(self, key_range: int) -> None:
        """Nobody is spoken to about it any more, for the time being."""
        if key_range in self._ways:
            way = self._ways.pop(key_range)
            for socket in way.caller.sockets:
                self._poller.unregister(socket)
            way.caller.close()


@functools.lru_cache
def identity_of_server(server: int, key_range: int) -> bytes:
    """A server's name on the socket of the next one of that key range's chain."""
    return f"server-{server}@{key_range}".encode()


@functools.lru_cache
def server_of(identity: bytes) -> int | None:
    """Read from a name that `identity_of_server` gives which server has it; none where it is another name."""
    found = re.fullmatch(rb"server-(\d{1,9})@\d+", identity)
    return int(found[1]) if found else None
