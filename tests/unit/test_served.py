"""Both ends of a served run, whatever the order of events: who joins, dies, comes back, is late, or sends rubbish."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.client_sockets import ClientsSocket
from paceline.engines.served import clients
from paceline.engines.served.clients import ServedClients
from paceline.layout import TensorSpec
from paceline.messages import Kind, Message
from paceline.roster import Uniform
from paceline.served import client_core, form, server_core
from paceline.served.client_core import ClientCore, Phase
from paceline.served.form import EPOCH, VERSION, Form, Refused
from paceline.served.server_core import Rules, ServerCore

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


def test_clients_that_stay_all_count_in_every_round() -> None:
    run = Run(min_clients=NUM_CLIENTS)
    for client in range(NUM_CLIENTS):
        run.start(client)
    run.calm(rounds=5)
    assert [sorted(run.accepted[number]) for number in range(5)] == [[0, 1, 2]] * 5


ACTIONS = st.one_of(
    st.tuples(st.just("start"), st.integers(0, NUM_CLIENTS - 1)),
    st.tuples(
        st.sampled_from(["go", "go", "go", "act", "train", "hear", "take", "kill", "leave", "cut", "rubbish"]),
        st.integers(0, 5),
    ),
    st.tuples(st.just("wait"), st.sampled_from([1, 10, 50])),
    st.tuples(st.just("restart"), st.just(0)),
)


@settings(deadline=None)
@given(actions=st.lists(ACTIONS, max_size=60), over=st.sampled_from([1.0, 2.0]), rubbish=st.binary(max_size=80))
def test_whatever_happens_rounds_go_on_and_nobody_counts_twice(
    actions: list[tuple[str, int]], over: float, rubbish: bytes
) -> None:
    run = Run(over=over, fraction=1.0 / over)
    for client in range(NUM_CLIENTS):
        run.start(client)
    for name, number in actions:
        process = run.processes[number % len(run.processes)] if run.processes else None
        if name == "start":
            run.start(number)
        elif name == "wait":
            run.now_s += number
            run.serve()
        elif name == "restart":
            run.restart()
        elif process is None:
            continue
        elif name == "go":
            process.act(run.now_s)
            process.train()
            while process.sent:
                run.hear(process)
            while process.coming:
                process.take(run.now_s)
        elif name == "act":
            process.act(run.now_s)
        elif name == "train":
            process.train()
        elif name == "hear":
            run.hear(process)
        elif name == "take":
            process.take(run.now_s)
        elif name == "kill":
            run.processes.remove(process)
        elif name == "leave":
            process.core.leave()
            process.flush()
        elif name == "cut":
            process.sent.clear()
            process.coming.clear()
        elif name == "rubbish":
            run.core.receive(process.route, key_of(process.client), [rubbish[:56], rubbish[56:]], run.now_s)
            run.serve()
    run.processes = [each for each in run.processes if each.core.phase is not Phase.OVER]
    run.start(0)
    run.calm(rounds=4)
    here = {each.client for each in run.processes if each.core.failure is None}
    believed = {client for client in here if run.core._clients[client].num_refused == 0}
    if over == 1.0:
        assert believed <= set(run.accepted[run.number - 1])


def test_of_two_processes_with_one_ticket_the_later_one_has_it() -> None:
    run = Run()
    first = run.start(1)
    run.calm()
    second = run.start(1)
    run.calm(rounds=3)
    assert first.core.failure == "another process has joined with the same ticket"
    assert second.core.failure is None
    assert any("takes its place" in text for text in run.log)


def test_a_revoked_ticket_is_refused_from_the_next_message_on() -> None:
    run = Run()
    lost, kept = run.start(1), run.start(2)
    run.calm()
    run.revoked.add(1)
    before = run.number
    run.calm(rounds=40)
    assert lost.core.failure == "this ticket was revoked"
    assert all(run.accepted[number] == [2] for number in range(before + 1, run.number))
    assert kept.core.failure is None


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


def piece(run: Run, **changed: Any) -> Message:
    fields = {"iteration": run.number, "shard": 0, "tensor_bytes": VECTOR.num_bytes, "payload": [b"\0" * PIECE_BYTES]}
    return Message(Kind.UPDATE, EPOCH, **{**fields, **changed})


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"tensor_bytes": 10 * 2**30}, "announces an update of 10,737,418,240 bytes, not of 48"),
        ({"payload": [b"\0" * (PIECE_BYTES - 1)]}, "has 19 bytes"),
        ({"body": {"scale": float("nan")}}, "number of steps is nan"),
        ({"body": {"scale": -1}}, "number of steps is -1"),
        ({"body": {"scale": "1"}}, "number of steps is 1"),
        ({"shard": -1}, "comes twice"),
    ],
)
def test_an_update_of_another_form_is_refused_with_its_reason(sent: dict[str, Any], said: str) -> None:
    run = Run()
    process = attached(run)
    run.core.receive(process.route, key_of(0), piece(run, **sent).encode(), run.now_s)
    assert [said in each.text for each in run.core.log] == [True]
    run.serve()
    assert run.accepted[0] == []
    assert (run.is_open, run.number) == (False, 1)  # nobody waits for it any more


@pytest.mark.parametrize("samples", [10**18, 0, -3, True, 1.5, "7", None, [1]])
def test_a_client_that_says_that_it_has_impossible_samples_is_refused(samples: Any) -> None:
    run = Run()
    process = run.start(0)
    run.core.receive(process.route, key_of(0), Message(Kind.JOIN, EPOCH, body={"version": VERSION}).encode(), 0.0)
    body = {"samples": samples, "state": VECTOR.described(), "update": VECTOR.described()}
    run.core.receive(process.route, key_of(0), Message(Kind.ATTACH, EPOCH, body=body).encode(), 0.0)
    run.serve()
    while process.coming:
        process.take(0.0)
    assert "samples, which nobody has" in (process.core.failure or "")
    assert run.core.present(0.0) == []


def test_a_client_counts_at_most_ten_times_as_much_as_the_median_one() -> None:
    run = Run()
    for client, samples in enumerate((10, 20, 10**9)):
        route = b"route-%d" % client
        run.core.receive(route, key_of(client), Message(Kind.JOIN, EPOCH, body={"version": VERSION}).encode(), 0.0)
        body = {"samples": samples, "state": VECTOR.described(), "update": VECTOR.described()}
        run.core.receive(route, key_of(client), Message(Kind.ATTACH, EPOCH, body=body).encode(), 0.0)
    assert run.core.open(0, state_of(0), 0.0)
    for client in range(3):
        content = bytes(update_of(client, 0))
        for index in range(3):
            part = content[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
            run.core.receive(
                b"route-%d" % client, key_of(client), piece(run, shard=index, payload=[part]).encode(), 0.0
            )
    assert [arrival.weight for arrival in run.core.arrivals] == [10.0, 20.0, 200.0]


@pytest.mark.parametrize("theirs", [[], None, "x", [["weight", "torch.float64", [2, 3]]], [["weight"]], [[1, 2, 3]]])
def test_other_tensors_are_named(theirs: Any) -> None:
    with pytest.raises(Refused, match=r"its script"):
        VECTOR.require(theirs)


def test_malformed_messages_leave_a_few_lines_and_nothing_else() -> None:
    """A ticket under which a hundred came is not believed any more."""
    run = Run(min_clients=2)
    attached(run, 0)
    other = attached(run, 1)
    frames = [[b"P1" + b"\xff" * 54, b""], [b"", b"", b"", b""], [struct.pack("<2sB", b"P1", 1), b"{" * 100]]
    for number in range(10_000):
        run.core.receive(b"route-9", key_of(0), list(frames[number % 3]), run.now_s)
    assert len(run.core.log) <= 5
    assert "nothing of its is taken from here on" in run.core.log[-1].text
    assert run.core.outbox == []
    other.train()
    while other.sent:
        run.hear(other)
    assert run.accepted[0] == [1]


def test_a_client_with_a_ticket_cannot_fill_the_log() -> None:
    run = Run()
    process = attached(run)
    for _ in range(1000):
        run.core.receive(process.route, key_of(0), piece(run, iteration=77).encode(), run.now_s)
    assert len(run.core.log) == 20
    assert run.core.log[-1].text.endswith("what else it does in this round is not told")


def cut(process: Process) -> None:
    """Its connection is lost, with what was on the way."""
    process.sent.clear()
    process.coming.clear()


def test_pieces_of_the_state_that_were_lost_are_asked_for_again() -> None:
    run = Run()
    process = attached(run)
    process.train()
    while process.core.phase is not Phase.FETCHING:
        run.now_s += 1.0
        process.act(run.now_s)
        while process.sent:
            run.hear(process)
        process.take(run.now_s)
    cut(process)
    run.calm(rounds=1)
    assert run.accepted[1] == [0]


@pytest.mark.parametrize("num_heard", range(4))
def test_pieces_of_an_update_that_were_lost_are_sent_again(num_heard: int) -> None:
    run = Run()
    process = attached(run)
    process.train()
    for _ in range(num_heard):
        run.hear(process)
    cut(process)
    run.calm(rounds=1)
    assert run.accepted[0] == [0]


def test_a_server_that_was_killed_learns_again_who_is_there_and_takes_the_update_of_its_round() -> None:
    run = Run(min_clients=2)
    waiting, training = attached(run, 0), attached(run, 1)
    waiting.train()
    while waiting.sent:
        run.hear(waiting)
    run.restart()
    assert training.core.phase is Phase.TRAINING
    run.calm(rounds=1)
    assert sorted(run.accepted[0]) == [0, 1]
    assert (waiting.core.failure, training.core.failure) == (None, None)


def test_a_client_that_died_is_waited_for_until_it_has_been_silent_and_no_longer() -> None:
    run = Run(min_clients=2)
    lost, other = attached(run, 0), attached(run, 1)
    run.processes.remove(lost)
    run.calm(rounds=1)
    assert PRESENCE_S < run.now_s < DEADLINE_S
    assert run.accepted[0] == [1]
    assert other.core.failure is None


def test_a_client_whose_word_that_its_update_counted_was_lost_learns_it_with_its_next_turn() -> None:
    run = Run()
    process = attached(run)
    process.train()
    while process.sent:
        run.hear(process)
    cut(process)
    assert process.core.counted == -1
    while process.core.phase is not Phase.TRAINING:
        run.now_s += 1.0
        process.act(run.now_s)
        while process.sent:
            run.hear(process)
        while process.coming:
            process.take(run.now_s)
    assert (process.core.round, process.core.counted) == (1, 0)


def test_an_update_that_is_late_or_of_a_round_that_begins_again_has_not_counted() -> None:
    run = Run(min_clients=2)
    process, other = attached(run, 0), attached(run, 1)
    run.now_s += DEADLINE_S
    run.serve()
    for each in (process, other):
        each.train()
        run.processes = [each]
        while each.sent:
            run.hear(each)
    run.processes = [process, other]
    run.calm(rounds=2)
    assert run.accepted[0] == []
    assert {each.core.counted for each in run.processes} <= {1, 2}
    process.core.receive(Message(Kind.TURN, EPOCH, iteration=1), run.now_s)
    assert process.core.counted == 0


def test_a_client_does_not_go_on_with_a_server_of_another_run() -> None:
    run = Run(min_clients=1)
    process = attached(run)
    run.restart()
    run.core._welcome["coding_seed"] = 5
    while process.core.failure is None and run.now_s < DEADLINE_S:
        run.now_s += 1.0
        process.act(run.now_s)
        while process.sent:
            run.hear(process)
        while process.coming:
            process.take(run.now_s)
    assert process.core.failure == "it serves another run by now; join again"


def test_an_update_that_comes_twice_counts_once() -> None:
    run = Run(min_clients=2)
    process, _ = attached(run, 0), attached(run, 1)
    process.train()
    process.sent += process.sent
    while process.sent:
        run.hear(process)
    assert run.accepted[0] == [0]


def test_a_piece_of_another_rounds_state_is_not_taken() -> None:
    core = ClientCore()
    core.receive(Message(Kind.OK, EPOCH), 0.0)
    core.attach(VECTOR, VECTOR, samples=1)
    core.receive(Message(Kind.ANSWER, EPOCH), 0.0)
    core.receive(Message(Kind.TURN, EPOCH, iteration=5), 0.0)
    for number in (4, 5):
        content = state_of(number)
        core.receive(Message(Kind.CONTENT, EPOCH, shard=0, iteration=number, payload=[content[:PIECE_BYTES]]), 0.0)
    assert bytes(core.state) == bytes(state_of(5)[:PIECE_BYTES])


def test_over_selection_ends_a_round_with_those_who_are_first() -> None:
    run = Run(over=3.0, fraction=0.34, min_clients=3)
    for client in range(3):
        run.start(client)
    run.calm(rounds=4)
    assert [len(run.accepted[number]) for number in range(4)] == [1, 1, 1, 1]


# --- what carries them ------------------------------------------------------------------------------------------------


class Clock:
    """A server's socket with one client, for which every look takes a second."""

    def __init__(self, process: Process, *, trains_from_s: float) -> None:
        self.process, self.now_s, self._trains_from_s = process, 0.0, trains_from_s

    def monotonic(self) -> float:
        return self.now_s

    def receive(self, timeout_s: float) -> tuple[bytes, bytes, list[Any]] | None:
        process = self.process
        if timeout_s:
            self.now_s += 1.0
            process.act(self.now_s)
            while process.coming:
                process.take(self.now_s)
            if self.now_s >= self._trains_from_s:
                process.train()
        return (process.route, key_of(process.client), process.sent.pop(0)) if process.sent else None

    def send(self, route: bytes, message: Message) -> None:
        self.process.coming.append(message.encode())

    def num_strangers(self) -> int:
        return 0


def test_who_is_at_its_turn_when_the_run_ends_still_gets_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(0, b"route")
    clock = Clock(process, trains_from_s=100.0)
    monkeypatch.setattr(clients.time, "monotonic", clock.monotonic)
    reporter = Mock(stop_requested=lambda: False)
    served = ServedClients(
        cast(ClientsSocket, clock),
        client_of={key_of(0): 0}.get,
        welcome={},
        rules=Rules(sampler=Uniform(), fraction=1.0, seed=0, deadline_s=60.0),
        reporter=reporter,
        say=lambda line: None,
    )
    value = [torch.full((3, 2), 0.0, dtype=torch.float64)]
    served.describe(VECTOR.specs, VECTOR.specs, current=lambda: value)
    assert not served.collect(0, lambda update: None)
    assert process.core.phase is Phase.TRAINING
    assert 60.0 <= clock.now_s < 75.0
    value[0].fill_(7.0)
    served.farewell()
    assert process.core.phase is Phase.OVER
    assert torch.equal(VECTOR.read(process.core.state)[0], value[0])
    assert 100.0 < clock.now_s < 120.0
