"""Both ends of a served run, whatever the order of events: who joins, dies, comes back, is late, or sends rubbish."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.client_sockets import ClientsSocket
from paceline.engines.served import clients
from paceline.engines.served.clients import ServedClients
from paceline.messages import Kind, Message
from paceline.roster import Uniform
from paceline.served.client_core import ClientCore, Phase
from paceline.served.form import EPOCH
from paceline.served.rules import Rules
from tests.unit.served_run import (
    DEADLINE_S,
    NUM_CLIENTS,
    PIECE_BYTES,
    PRESENCE_S,
    VECTOR,
    Process,
    Run,
    actions_among,
    attached,
    cut,
    key_of,
    small_pieces,  # noqa: F401 - for every test
    state_of,
)


def test_clients_that_stay_all_count_in_every_round() -> None:
    run = Run(min_clients=NUM_CLIENTS)
    for client in range(NUM_CLIENTS):
        run.start(client)
    run.calm(rounds=5)
    assert [sorted(run.accepted[number]) for number in range(5)] == [[0, 1, 2]] * 5


@settings(deadline=None)
@given(actions=actions_among(NUM_CLIENTS), over=st.sampled_from([1.0, 2.0]), rubbish=st.binary(max_size=80))
def test_whatever_happens_rounds_go_on_and_nobody_counts_twice(
    actions: list[tuple[str, int]], over: float, rubbish: bytes
) -> None:
    run = Run(over=over, fraction=1.0 / over)
    for client in range(NUM_CLIENTS):
        run.start(client)
    run.play(actions, lambda process: [rubbish[:56], rubbish[56:]])
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


def test_pieces_of_the_state_that_were_lost_are_asked_for_again() -> None:
    run = Run()
    process = attached(run)
    process.train()
    while process.core.phase is not Phase.FETCHING:
        run.now_s += 1.0
        process.act(run.now_s)
        run.hear_all(process)
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
    run.hear_all(waiting)
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
    run.hear_all(process)
    cut(process)
    assert process.core.counted == -1
    while process.core.phase is not Phase.TRAINING:
        run.now_s += 1.0
        process.act(run.now_s)
        run.exchange(process)
    assert (process.core.round, process.core.counted) == (1, 0)


def test_an_update_that_is_late_or_of_a_round_that_begins_again_has_not_counted() -> None:
    run = Run(min_clients=2)
    process, other = attached(run, 0), attached(run, 1)
    run.now_s += DEADLINE_S
    run.serve()
    for each in (process, other):
        each.train()
        run.processes = [each]
        run.hear_all(each)
    run.processes = [process, other]
    run.calm(rounds=2)
    assert run.accepted[0] == []
    assert {each.core.counted for each in run.processes} <= {1, 2}
    process.core.receive(Message(Kind.TURN, EPOCH, iteration=1), run.now_s)
    assert process.core.counted == 0


def test_a_client_forgets_that_it_counted_in_a_round_that_began_again_without_it() -> None:
    run = Run()
    absent, other = attached(run, 0), attached(run, 1)
    while run.number < 1 or absent.core.counted < 1:
        run.now_s += 1.0
        for each in (absent,) if run.number == 1 else (absent, other):
            each.act(run.now_s)
            each.train()
            run.exchange(each)
    run.restart()
    run.processes = [other]
    run.calm(rounds=1)
    assert (run.accepted[1], run.number, absent.core.counted) == ([1], 2, 1)
    run.processes = [absent, other]
    while absent.core.round < 2:
        run.now_s += 1.0
        absent.act(run.now_s)
        run.exchange(absent)
        other.act(run.now_s)
        other.train()
        run.exchange(other)
    assert absent.core.counted == 0


def test_a_client_does_not_go_on_with_a_server_of_another_run() -> None:
    run = Run(min_clients=1)
    process = attached(run)
    run.restart()
    run.core._welcome["coding_seed"] = 5
    while process.core.failure is None and run.now_s < DEADLINE_S:
        run.now_s += 1.0
        process.act(run.now_s)
        run.exchange(process)
    assert process.core.failure == "it serves another run by now; join again"


def test_an_update_that_comes_twice_counts_once() -> None:
    run = Run(min_clients=2)
    process, _ = attached(run, 0), attached(run, 1)
    process.train()
    process.sent += process.sent
    run.hear_all(process)
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


def served(clock: Clock, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[ServedClients, torch.Tensor]:
    """And what its model is, which is zeros."""
    monkeypatch.setattr(clients.time, "monotonic", clock.monotonic)
    found = ServedClients(
        cast(ClientsSocket, clock),
        client_of={key_of(0): 0}.get,
        welcome={},
        rules=Rules(sampler=Uniform(), fraction=1.0, seed=0, deadline_s=60.0),
        reporter=Mock(stop_requested=lambda: False),
        say=lambda line: None,
        **settings,
    )
    value = torch.zeros((3, 2), dtype=torch.float64)
    found.describe(VECTOR.specs, VECTOR.specs, current=lambda: [value])
    return found, value


def test_who_is_at_its_turn_when_the_run_ends_still_gets_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(0, b"route")
    clock = Clock(process, trains_from_s=100.0)
    server, value = served(clock, monkeypatch)
    assert not server.collect(0, lambda update: None)
    assert process.core.phase is Phase.TRAINING
    assert 60.0 <= clock.now_s < 75.0
    value.fill_(7.0)
    server.farewell()
    assert process.core.phase is Phase.OVER
    assert torch.equal(VECTOR.read(process.core.state)[0], value)
    assert 100.0 < clock.now_s < 120.0


@pytest.mark.parametrize("loading_s", [0.0, 60.0])
def test_a_server_that_was_killed_at_the_end_of_its_run_waits_for_those_who_wait_for_it(
    loading_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its script takes to load what it needs, while nobody listens."""
    process = Process(0, b"route")
    clock = Clock(process, trains_from_s=1.0)
    first, _ = served(clock, monkeypatch)
    assert not first.collect(0, lambda update: None)
    began_s = clock.now_s
    cut(process)
    again, value = served(clock, monkeypatch, goes_on=True)
    value.fill_(7.0)
    clock.now_s += loading_s
    again.farewell()
    assert process.core.phase is Phase.OVER
    assert torch.equal(VECTOR.read(process.core.state)[0], value)
    assert clock.now_s - began_s < 20.0 + loading_s
