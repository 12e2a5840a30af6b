"""A served run without sockets: its server, processes of its clients, and what is on its way between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

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


def samples_of(client: int) -> int:
    return 10 + client


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
            self.attach()
        self.core.tick(now_s)
        self.flush()

    def attach(self) -> None:
        self.core.attach(VECTOR, VECTOR, samples=samples_of(self.client))

    def train(self) -> None:
        if self.core.phase is Phase.TRAINING:
            number = int(VECTOR.read(self.core.state)[0][0, 0])
            assert number == self.core.round, "it trains from another round's state"
            self.send(number)
            self.flush()

    def send(self, number: int) -> None:
        """What came of its turn in this round."""
        self.core.send(update_of(self.client, number), scale=1.0)

    def flush(self) -> None:
        self.sent += [message.encode() for message in self.core.outbox]
        self.core.outbox.clear()

    def take(self, now_s: float) -> None:
        if self.coming:
            self.core.receive(Message.decode(self.coming.pop(0), epoch=EPOCH), now_s)
            self.flush()


class Run:
    """A server that lasts, or is killed and begins its round again, and processes of its clients."""

    def __init__(self, *, min_clients: int = 1, over: float = 1.0, fraction: float = 1.0, least: int = 1) -> None:
        self.rules = Rules(
            sampler=Uniform(),
            fraction=fraction,
            seed=0,
            min_clients=min_clients,
            deadline_s=DEADLINE_S,
            over=over,
            least=least,
        )
        self.now_s, self.number, self.num_routes = 0.0, 0, 0
        self.processes: list[Process] = []
        self.accepted: dict[int, list[int]] = defaultdict(list)
        self.revoked: set[int] = set()
        self.log: list[str] = []
        self.restart()

    def restart(self) -> None:
        """What was on its way to and from the server is lost; what it had of its round, too."""
        self.core = self.made_core()
        self.core.expect(self.number)
        self.is_open = False
        self.accepted[self.number] = []
        for process in self.processes:
            process.sent.clear()
            process.coming.clear()

    def made_core(self, *, update: Form = VECTOR, **settings: Any) -> ServerCore:
        return ServerCore(
            client_of=self.client_of,
            welcome={"strategy": "fed-avg"},
            state=VECTOR,
            update=update,
            rules=self.rules,
            presence_s=PRESENCE_S,
            **settings,
        )

    def client_of(self, key: bytes) -> int | None:
        client = int(key.removeprefix(key_of(0)[:-1]))
        return None if client in self.revoked else client

    def made_process(self, client: int, route: bytes) -> Process:
        return Process(client, route)

    def start(self, client: int) -> Process:
        self.num_routes += 1
        process = self.made_process(client, b"route-%d" % self.num_routes)
        self.processes.append(process)
        return process

    def hear(self, process: Process) -> None:
        """The server takes the oldest message of a process."""
        if process.sent:
            self.core.receive(process.route, key_of(process.client), process.sent.pop(0), self.now_s)
            self.serve()

    def hear_all(self, process: Process) -> None:
        """The server takes what a process has sent."""
        while process.sent:
            self.hear(process)

    def exchange(self, process: Process) -> None:
        """And the process takes what the server has sent."""
        self.hear_all(process)
        while process.coming:
            process.take(self.now_s)

    def serve(self) -> None:
        core = self.core
        if not self.is_open:
            self.is_open = core.open(self.number, state_of(self.number), self.now_s)
        self.take_updates()
        if self.is_open and core.is_closed(self.now_s):
            self.is_open = False
            self.end_round()
        for route, message in core.outbox:
            for process in self.processes:
                if process.route == route:
                    process.coming.append(message.encode())
        core.outbox.clear()
        self.log += [said.text for said in core.log]
        core.log.clear()

    def take_updates(self) -> None:
        while self.core.arrivals:
            arrival = self.core.arrivals.popleft()
            found = VECTOR.read(arrival.content)[0]
            assert torch.equal(found, torch.full((3, 2), value_of(arrival.client, self.number), dtype=torch.float64))
            self.accept(arrival.client)

    def accept(self, client: int) -> None:
        self.core.accept(client)
        self.accepted[self.number].append(client)

    def end_round(self) -> None:
        self.core.close(self.now_s)
        self.next_round()

    def next_round(self) -> None:
        drawn = self.accepted[self.number]
        assert len(set(drawn)) == len(drawn), "a client counts twice"
        self.number += 1

    def play(self, actions: list[tuple[str, int]], rubbish: Callable[[Process], list[Any]]) -> None:
        """What happens to the server, and to the process of that number."""
        for name, number in actions:
            process = self.processes[number % len(self.processes)] if self.processes else None
            if name == "start":
                self.start(number)
            elif name == "wait":
                self.now_s += number
                self.serve()
            elif name == "restart":
                self.restart()
            elif process is not None:
                self._happens_to(process, name, rubbish)

    def _happens_to(self, process: Process, name: str, rubbish: Callable[[Process], list[Any]]) -> None:
        if name in ("go", "act"):
            process.act(self.now_s)
        if name in ("go", "train"):
            process.train()
        if name == "go":
            self.exchange(process)
        elif name == "hear":
            self.hear(process)
        elif name == "take":
            process.take(self.now_s)
        elif name == "kill":
            self.processes.remove(process)
        elif name == "leave":
            process.core.leave()
            process.flush()
        elif name == "cut":
            cut(process)
        elif name == "rubbish":
            self.core.receive(process.route, key_of(process.client), rubbish(process), self.now_s)
            self.serve()

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
                self.hear_all(process)
            self.serve()
            for process in self.processes:
                while process.coming:
                    process.take(self.now_s)
            if self.number >= goal:
                return
        raise AssertionError(f"round {self.number} does not end: {[process.core.phase for process in self.processes]}")


def actions_among(num_clients: int) -> st.SearchStrategy[list[tuple[str, int]]]:
    """For `Run.play`."""
    of_processes = ["go", "go", "go", "act", "train", "hear", "take", "kill", "leave", "cut", "rubbish"]
    each = st.one_of(
        st.tuples(st.just("start"), st.integers(0, num_clients - 1)),
        st.tuples(st.sampled_from(of_processes), st.integers(0, 2 * num_clients - 1)),
        st.tuples(st.just("wait"), st.sampled_from([1, 10, 50])),
        st.tuples(st.just("restart"), st.just(0)),
    )
    return st.lists(each, max_size=20 * num_clients)


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
