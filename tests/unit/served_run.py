"""A served run without sockets: its server, processes of its clients, and what is on its way between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.layout import TensorSpec
from paceline.messages import Message
from paceline.roster import Uniform
from paceline.served import client_core, form, server_core
from paceline.served.client_core import ClientCore, Phase
from paceline.served.form import EPOCH, Form
from paceline.served.rules import Rules
from paceline.served.server_core import ServerCore

NUM_CLIENTS = 3
VECTOR = Form((TensorSpec("weight", (3, 2), torch.float64),))
PIECE_BYTES = 20  # the vector travels in three pieces
DEADLINE_S, PRESENCE_S = 100.0, 30.0


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (form, server_core, client_core):
            patch.setattr(module, "FRAME_BYTES", PIECE_BYTES)
        yield


def state_of(number: int) -> memoryview:
    return VECTOR.write([torch.full((3, 2), float(number), dtype=torch.float64)])


def value_of(client: int, number: int) -> float:
    return 100.0 * client + number


def update_of(client: int, number: int) -> memoryview:
    return VECTOR.write([torch.full((3, 2), value_of(client, number), dtype=torch.float64)])


def key_of(client: int) -> bytes:
    return b"key-%d" % client


class Process:
    """A client's, with what is on its way to and from it."""

    def __init__(self, client: int, route: bytes) -> None:
        self.client, self.route, self.core = client, route, ClientCore()
        self.sent: list[list[Any]] = []
        self.coming: list[list[Any]] = []

    def act(self, now_s: float) -> None:
        """What its script does, and what its socket takes."""
        if self.core.phase is Phase.WELCOMED:
            self.core.attach(VECTOR, VECTOR, samples=10 + self.client)
        self.core.tick(now_s)
        self.flush()

    def train(self) -> None:
        if self.core.phase is Phase.TRAINING:
            number = int(VECTOR.read(self.core.state)[0][0, 0])
            assert number == self.core.round, "it trains from another round's state"
            self.core.send(update_of(self.client, number), scale=1.0)
            self.flush()

    def flush(self) -> None:
        self.sent += [message.encode() for message in self.core.outbox]
        self.core.outbox.clear()

    def take(self, now_s: float) -> None:
        if self.coming:
            self.core.receive(Message.decode(self.coming.pop(0), epoch=EPOCH), now_s)
            self.flush()


class Run:
    """A server that lasts, or is killed and begins its round again, and processes of its clients."""

    def __init__(self, *, min_clients: int = 1, over: float = 1.0, fraction: float = 1.0) -> None:
        self.rules = Rules(
            sampler=Uniform(), fraction=fraction, seed=0, min_clients=min_clients, deadline_s=DEADLINE_S, over=over
        )
        self.now_s, self.number, self.num_routes = 0.0, 0, 0
        self.processes: list[Process] = []
        self.accepted: dict[int, list[int]] = defaultdict(list)
        self.revoked: set[int] = set()
        self.log: list[str] = []
        self.restart()

    def restart(self) -> None:
        """What was on its way to and from the server is lost; what it had of its round, too."""
        keys = {key_of(client): client for client in range(NUM_CLIENTS)}
        self.core = ServerCore(
            client_of=lambda key: keys.get(key) if keys.get(key) not in self.revoked else None,
            welcome={"strategy": "fed-avg"},
            state=VECTOR,
            update=VECTOR,
            rules=self.rules,
            presence_s=PRESENCE_S,
        )
        self.is_open = False
        self.accepted[self.number] = []
        for process in self.processes:
            process.sent.clear()
            process.coming.clear()

    def start(self, client: int) -> Process:
        self.num_routes += 1
        process = Process(client, b"route-%d" % self.num_routes)
        self.processes.append(process)
        return process

    def hear(self, process: Process) -> None:
        """The server takes the oldest message of a process."""
        if process.sent:
            self.core.receive(process.route, key_of(process.client), process.sent.pop(0), self.now_s)
            self.serve()

    def serve(self) -> None:
        core = self.core
        if not self.is_open:
            self.is_open = core.open(self.number, state_of(self.number), self.now_s)
        while core.arrivals:
            arrival = core.arrivals.popleft()
            found = VECTOR.read(arrival.content)[0]
            assert torch.equal(found, torch.full((3, 2), value_of(arrival.client, self.number), dtype=torch.float64))
            core.accept(arrival.client)
            self.accepted[self.number].append(arrival.client)
        if self.is_open and core.is_closed(self.now_s):
            core.close(self.now_s)
            drawn = self.accepted[self.number]
            assert len(set(drawn)) == len(drawn), "a client counts twice"
            self.is_open, self.number = False, self.number + 1
        for route, message in core.outbox:
            for process in self.processes:
                if process.route == route:
                    process.coming.append(message.encode())
        core.outbox.clear()
        self.log += [said.text for said in core.log]
        core.log.clear()

    def check_counted(self, process: Process) -> None:
        """When its turn begins, a client knows of the round before whether its update counted."""
        core, before = process.core, self.accepted.get(process.core.round - 1, [])
        if core.phase is Phase.TRAINING and core.counted == core.round - 1 >= 0:
            assert process.client in before, "what did not count is said to have"

    def calm(self, *, rounds: int = 2) -> None:
        """From here on nothing is lost and everybody trains: some rounds go by. Each process is asked as often."""
        goal = self.number + rounds
        for _ in range(400):
            self.now_s += 1.0
            for process in self.processes:
                process.act(self.now_s)
                self.check_counted(process)
                process.train()
                while process.sent:
                    self.hear(process)
            self.serve()
            for process in self.processes:
                while process.coming:
                    process.take(self.now_s)
            if self.number >= goal:
                return
        raise AssertionError(f"round {self.number} does not end: {[process.core.phase for process in self.processes]}")


def attached(run: Run, client: int = 0) -> Process:
    """A process whose turn it is, and which has the round's state; so have those that are there already."""
    process = run.start(client)
    for _ in range(20):
        run.now_s += 1.0
        for each in run.processes:
            each.act(run.now_s)
            while each.sent:
                run.hear(each)
        for each in run.processes:
            while each.coming:
                each.take(run.now_s)
        if all(each.core.phase is Phase.TRAINING for each in run.processes):
            break
    return process


def cut(process: Process) -> None:
    """Its connection is lost, with what was on the way."""
    process.sent.clear()
    process.coming.clear()
