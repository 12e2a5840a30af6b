"""Who calls a server by a name that it has called it by before says so, and nobody else does."""

from __future__ import annotations

from collections import deque
from contextlib import closing
from typing import Any, cast

import pytest
import zmq

from paceline.comm.servers import copies, sockets
from paceline.comm.servers.copies import NextCopies
from paceline.comm.servers.line import BellAddress
from paceline.comm.servers.sockets import Move, ServerAddress, SocketCarrier
from paceline.comm.wire import Caller, Keys
from paceline.messages import Kind, Message
from paceline.server.client_core import ClientCore

ENDPOINTS = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")  # where nobody listens


class Told:
    """A worker's core that has nothing to say to who serves a key range now."""

    def moved(self, index: int, **about: Any) -> tuple[()]:
        return ()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What callers are made, and which are closed, in that order."""
    noted: list[str] = []
    close = Caller.close

    def made(keys: Keys, *, endpoint: str, identity: str, is_anew: bool = False) -> Caller:
        noted.append(f"{identity} calls {ENDPOINTS.index(endpoint)}{' anew' if is_anew else ''}")
        return Caller(keys, endpoint=endpoint, identity=identity, is_anew=is_anew)

    def closed(caller: Caller, **how: float) -> None:
        noted.append("one is closed")
        close(caller, **how)

    for module in (copies, sockets):
        monkeypatch.setattr(module, "Caller", made)
    monkeypatch.setattr(Caller, "close", closed)
    return noted


def test_a_worker_calls_a_server_anew_that_serves_a_key_range_again(calls: list[str]) -> None:
    """It closes its connection to the one before first."""
    servers = [ServerAddress(ENDPOINTS[0], None), ServerAddress(ENDPOINTS[1], None)]
    carrier = SocketCarrier(
        Keys.generate(), servers, rank=3, num_workers=4, epoch=1, deadline_s=None, moves=deque[Move]()
    )
    client = cast(ClientCore, Told())
    with closing(carrier):
        assert calls == ["worker-3 calls 0", "worker-3 calls 1"]
        del calls[:]
        for epoch, server in enumerate((1, 0, 1), start=2):
            carrier._follow(Move(0, ServerAddress(ENDPOINTS[server], None, epoch, copy_of=0)), client)
        assert calls == [
            "one is closed",
            "worker-3@0 calls 1",
            "one is closed",
            "worker-3@0 calls 0",
            "one is closed",
            "worker-3@0 calls 1 anew",
        ]
        del calls[:]
        gone = ServerAddress(ENDPOINTS[0], BellAddress(2**22, 0, 0), 9, copy_of=0)
        carrier._follow(Move(0, gone), client)
        assert not calls, "its connection stays where the other one is gone as well"


def test_a_server_calls_one_anew_that_has_its_next_copy_again(calls: list[str]) -> None:
    next_copies = NextCopies(Keys.generate(), server=5, poller=zmq.Poller())
    next_copies.endpoints.update(enumerate(ENDPOINTS))
    with closing(next_copies):
        for key_range, to in ((0, 0), (0, 1), (1, 0), (0, 0), (0, 0)):
            next_copies.send(key_range, to, Message(Kind.PULL, 1))
        assert [each for each in calls if "calls" in each] == [
            "server-5@0 calls 0",
            "server-5@0 calls 1",
            "server-5@1 calls 0",
            "server-5@0 calls 0 anew",
        ]
