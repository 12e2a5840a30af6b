"""The sockets of a served run, over connections that are lost without a word."""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from paceline.comm.client_sockets import ClientsSocket, ServerSocket
from paceline.comm.tickets import Ticket, Tickets
from paceline.messages import Kind, Message
from paceline.served.form import EPOCH
from tests.ports import free_port


class Router:
    """Carries connections to a port, until it is started anew: clients' ends are closed then, and nobody tells the
    server, as by NAT that forgets."""

    def __init__(self, port: int) -> None:
        self._port, self._listening = port, socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._forgotten: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def restart(self) -> None:
        for outer, inner in self._pairs:
            self._forgotten.append(inner)
            outer.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def close(self) -> None:
        self._listening.close()
        self.restart()
        for inner in self._forgotten:
            inner.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                outer, _ = self._listening.accept()
                inner = socket.create_connection(("127.0.0.1", self._port))
                self._pairs.append((outer, inner))
                for source, target in ((outer, inner), (inner, outer)):
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                target.sendall(data)


@pytest.fixture
def port() -> int:
    return free_port()


def test_a_client_whose_connection_was_forgotten_is_heard_again_at_once(port: int, tmp_path: Path) -> None:
    tickets = Tickets.made(tmp_path, num_clients=1, address=f"127.0.0.1:{port}")
    ticket = Ticket.read(tickets.path_of(0))
    server = ClientsSocket(tickets.server_keys(), host="127.0.0.1", port=port, client_of=tickets.client_of)
    with (
        closing(server),
        closing(Router(port)) as router,
        closing(ServerSocket(ticket, address=f"127.0.0.1:{router.port}")) as client,
    ):
        routes = []
        for number in range(3):
            heard = None
            for _ in range(20):  # a message that was on its way is lost with its connection
                client.send(Message(Kind.PULSE, EPOCH, iteration=number))
                while (came := server.receive(0.5)) is not None:
                    heard = came if Message.decode(came[2], epoch=EPOCH).iteration == number else heard
                if heard is not None:
                    break
            assert heard is not None, f"mute after the router was started anew {number} time(s)"
            routes.append(heard[0])
            server.send(heard[0], Message(Kind.PULSE, EPOCH, iteration=number))
            answer = client.receive(60.0)
            assert answer is not None
            assert Message.decode(answer, epoch=EPOCH).iteration == number
            router.restart()
        assert len(set(routes)) == 1
