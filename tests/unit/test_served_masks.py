"""Updates of a served run under masks: the sum is right or there is none, whatever is lost and whoever goes, and what
the server is sent tells nothing of one client's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cryptography")

from paceline.layout import TensorSpec
from paceline.messages import Kind, Message, raw_bytes
from paceline.roster import Uniform
from paceline.served import client_core, form, server_core
from paceline.served.client_core import ClientCore, Phase
from paceline.served.form import EPOCH, Form, Refused
from paceline.served.masked_round import MaskedRound
from paceline.served.masked_turn import MaskedTurn
from paceline.served.masking import KEYS, SHARES, UNMASKING, VECTORS, Masking, heard, said
from paceline.served.rules import Rules
from paceline.served.server_core import ServerCore

NUM_CLIENTS, NUM_ELEMENTS, CLIP = 5, 6, 8.0
STATE = Form((TensorSpec("state", (2,), torch.float64),))
WORDS = Form((TensorSpec("words", (NUM_ELEMENTS,), torch.int32),))
MASKING = Masking(clip=CLIP, num_neighbours=None, threshold=0.6, least=3, num_elements=NUM_ELEMENTS, seed=3)
DEADLINE_S, PRESENCE_S = 100.0, 30.0


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (form, server_core, client_core):
            patch.setattr(module, "FRAME_BYTES", 10)  # words travel in three pieces
        yield


def vector_of(client: int, number: int) -> Tensor:
    return torch.linspace(-1, 1, NUM_ELEMENTS, dtype=torch.float64) * (client + 1) + 0.1 * number


def samples_of(client: int) -> int:
    return 10 + client


@dataclass
class Process:
    """A client's, with what is on its way to and from it."""

    client: int
    route: bytes
    core: ClientCore = field(default_factory=ClientCore)
    sent: list[list[Any]] = field(default_factory=list)
    coming: list[list[Any]] = field(default_factory=list)
    masking: Masking = MASKING
    diverges: bool = False

    def act(self, now_s: float) -> None:
        if self.core.phase is Phase.WELCOMED:
            self.core.attach(
                STATE,
                WORDS,
                samples=samples_of(self.client),
                mask=lambda told, number: MaskedTurn(self.client, told, self.masking, round_number=number),
            )
        self.core.tick(now_s)
        self.flush()

    def train(self) -> None:
        if self.core.phase is Phase.TRAINING:
            vector = vector_of(self.client, self.core.round)
            self.core.send_masked(vector * torch.nan if self.diverges else vector)
            self.flush()

    def flush(self) -> None:
        self.sent += [message.encode() for message in self.core.outbox]
        self.core.outbox.clear()

    def take(self, now_s: float) -> None:
        if self.coming:
            self.core.receive(Message.decode(self.coming.pop(0), epoch=EPOCH), now_s)
            self.flush()


class Run:
    """A server, and processes of its clients."""

    def __init__(self, *, min_clients: int = NUM_CLIENTS, fraction: float = 1.0, over: float = 1.0) -> None:
        self.rules = Rules(
            sampler=Uniform(),
            fraction=fraction,
            seed=0,
            min_clients=min_clients,
            deadline_s=DEADLINE_S,
            over=over,
            least=3,
        )
        self.now_s, self.number, self.num_routes = 0.0, 0, 0
        self.processes: list[Process] = []
        self.counted: dict[int, tuple[int, ...]] = {}
        self.log: list[str] = []
        self.seen: list[Message] = []
        self.masking = MASKING
        self.restart()

    def restart(self) -> None:
        """What was on its way is lost, and what the server had of its round, too."""
        self.core = ServerCore(
            client_of={b"%d" % client: client for client in range(NUM_CLIENTS)}.get,
            welcome={},
            state=STATE,
            update=WORDS,
            rules=self.rules,
            presence_s=PRESENCE_S,
            mask=lambda weights, number: MaskedRound(weights, self.masking, number=number),
        )
        self.is_open = False
        for process in self.processes:
            process.sent.clear()
            process.coming.clear()

    def start(self, client: int) -> Process:
        self.num_routes += 1
        self.processes.append(Process(client, b"route-%d" % self.num_routes, masking=self.masking))
        return self.processes[-1]

    def hear(self, process: Process) -> None:
        if process.sent:
            frames = process.sent.pop(0)
            self.seen.append(Message.decode(frames, epoch=EPOCH))
            self.core.receive(process.route, b"%d" % process.client, frames, self.now_s)
            self.serve()

    def serve(self) -> None:
        core = self.core
        if not self.is_open:
            state = STATE.write([torch.zeros(2, dtype=torch.float64)])
            self.is_open = core.open(self.number, state, self.now_s)
        if self.is_open and core.is_closed(self.now_s):
            self.is_open = False
            if core.sum is not None:
                self.check_sum()
                self.number += 1
            core.close(self.now_s)
            if core.failure is not None and not core.begins_again:
                self.counted[self.number] = ()
                self.number += 1
        for route, message in core.outbox:
            for process in self.processes:
                if process.route == route:
                    process.coming.append(message.encode())
        core.outbox.clear()
        self.log += [each.text for each in core.log]
        core.log.clear()

    def check_sum(self) -> None:
        found = self.core.sum
        assert found is not None
        assert len(set(found.clients)) == len(found.clients) >= 3
        largest = max(samples_of(client) for client in self.core._turns)
        weights = {client: samples_of(client) / largest for client in found.clients}
        wanted = sum(weight * vector_of(client, self.number) for client, weight in weights.items())
        torch.testing.assert_close(found.vector, wanted, rtol=0.0, atol=1e-6)
        assert found.weight == pytest.approx(sum(weights.values()))
        self.counted[self.number] = found.clients
        for client in found.clients:
            self.core.accept(client)

    def calm(self, *, rounds: int = 2) -> None:
        """From here on nothing is lost and everybody trains: some rounds go by."""
        goal = self.number + rounds
        for _ in range(1000):
            self.now_s += 1.0
            for process in self.processes:
                process.act(self.now_s)
                process.train()
                while process.sent:
                    self.hear(process)
            self.serve()
            for process in self.processes:
                while process.coming:
                    process.take(self.now_s)
            if self.number >= goal:
                return
        raise AssertionError(f"round {self.number} does not end: {[each.core.phase for each in self.processes]}")


def test_clients_that_stay_are_all_in_every_sum() -> None:
    run = Run()
    for client in range(NUM_CLIENTS):
        run.start(client)
    run.calm(rounds=3)
    assert [sorted(run.counted[number]) for number in range(3)] == [list(range(NUM_CLIENTS))] * 3
    assert run.log == [f"is there, with {samples_of(client)} samples" for client in range(NUM_CLIENTS)]


@pytest.mark.parametrize(("fraction", "fewest"), [(1.0, 3), (0.5, 6), (0.25, 11)])
def test_a_round_waits_until_those_who_are_drawn_hide_one_another(fraction: float, fewest: int) -> None:
    rules = Rules(sampler=Uniform(), fraction=fraction, seed=0, least=3)
    assert rules.fewest == fewest
    assert round(fraction * fewest) >= 3 > round(fraction * (fewest - 1))


ACTIONS = st.one_of(
    st.tuples(st.just("start"), st.integers(0, NUM_CLIENTS - 1)),
    st.tuples(
        st.sampled_from(["go", "go", "go", "go", "act", "train", "hear", "take", "kill", "leave", "cut", "rubbish"]),
        st.integers(0, 9),
    ),
    st.tuples(st.just("wait"), st.sampled_from([1, 10, 50])),
    st.tuples(st.just("restart"), st.just(0)),
)


@settings(deadline=None)
@given(actions=st.lists(ACTIONS, max_size=80), rubbish=st.binary(max_size=40), stage=st.integers(0, 5))
def test_whatever_happens_a_sum_is_right_and_rounds_go_on(
    actions: list[tuple[str, int]], rubbish: bytes, stage: int
) -> None:
    run = Run(min_clients=3)
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
        elif name in ("act", "train"):
            process.act(run.now_s) if name == "act" else process.train()
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
            attempt = process.core._attempt.get("attempt")
            message = said(stage, str(attempt), {process.client: rubbish}, number=run.number)
            run.core.receive(process.route, b"%d" % process.client, message.encode(), run.now_s)
            run.serve()
    run.processes = [each for each in run.processes if each.core.phase is not Phase.OVER]
    for client in range(3):
        run.start(client)
    run.calm(rounds=2)


def after(run: Run, stop: Callable[[Run], bool]) -> None:
    """One event at a time, until something holds."""
    for _ in itertools.repeat(None, 1000):
        run.now_s += 0.1
        for process in run.processes:
            process.act(run.now_s)
            if process.core.phase is Phase.TRAINING and stop(run):
                return
            process.train()
            run.hear(process)
            if stop(run):
                return
            process.take(run.now_s)
    raise AssertionError("it did not come to that")


def is_at(stage: int) -> Callable[[Run], bool]:
    return lambda run: run.core._masked is not None and run.core._masked.stage == stage


@pytest.mark.parametrize("stage", [KEYS, SHARES, VECTORS, UNMASKING])
@pytest.mark.parametrize("num_lost", [1, 3])
def test_clients_that_die_in_a_stage_leave_a_right_sum_or_none(stage: int, num_lost: int) -> None:
    run = Run()
    for client in range(NUM_CLIENTS):
        run.start(client)
    after(run, is_at(stage))
    run.core._rules = replace(run.rules, min_clients=3)
    del run.processes[:num_lost]
    if num_lost > 1:
        for client in range(num_lost):
            run.start(client)
    run.calm(rounds=2)
    if num_lost == 1:
        assert PRESENCE_S < run.now_s < DEADLINE_S
        had_sent = stage == UNMASKING
        assert sorted(run.counted[0]) == [*([0] if had_sent else []), 1, 2, 3, 4]


def test_words_that_are_lost_are_said_again() -> None:
    """Every message of secrets is lost once, either way."""
    run = Run()
    for client in range(NUM_CLIENTS):
        run.start(client)
    lost: set[tuple[str, int, int, object]] = set()

    def lose(process: Process, way: str, queue: list[list[Any]]) -> None:
        for frames in list(queue):
            message = Message.decode(frames, epoch=EPOCH)
            mark = (way, process.client, message.kind, message.body.get("stage"))
            if message.kind is Kind.SECRETS and mark not in lost:
                lost.add(mark)
                queue.remove(frames)

    for _ in range(60):
        run.now_s += 1.0
        for process in run.processes:
            process.act(run.now_s)
            process.train()
            lose(process, "out", process.sent)
            while process.sent:
                run.hear(process)
            lose(process, "in", process.coming)
            while process.coming:
                process.take(run.now_s)
    assert run.number >= 1
    assert sorted(run.counted[0]) == list(range(NUM_CLIENTS))
    assert len(lost) == 6 * NUM_CLIENTS  # three of its own, three of the server's


def test_what_the_server_is_sent_tells_nothing_of_one_client() -> None:
    """All updates are zero: what travels in place of them takes every value of a byte equally often."""
    num_elements = 16_384
    masking = Masking(clip=CLIP, num_neighbours=None, threshold=0.6, least=3, num_elements=num_elements, seed=3)
    masked = MaskedRound(dict.fromkeys(range(4), 1.0), masking, number=0)
    turns = {client: MaskedTurn(client, masked.told(client), masking, round_number=0) for client in range(4)}
    for client, turn in turns.items():
        masked.receive(client, turn.keys())
    for _ in (KEYS, SHARES):
        for client, message in masked.end_stage().items():
            answer = turns[client].answer(message)
            if answer is not None:
                masked.receive(client, answer)
    for client, turn in turns.items():
        content = bytearray(turn.mask(torch.zeros(num_elements, dtype=torch.float64)))
        masked.take_vector(client, content)
        for place in (0, 3):  # the lowest and the highest byte of a word
            counts = np.bincount(np.frombuffer(content, dtype=np.uint8)[place::4], minlength=256)
            expected = num_elements / 256
            assert float(((counts - expected) ** 2 / expected).sum()) < 377
    for client, message in masked.end_stage().items():
        answer = turns[client].answer(message)
        assert answer is not None
        masked.receive(client, answer)
    masked.end_stage()
    assert masked.sum is not None
    assert float(masked.sum.vector.abs().max()) < 1e-6


def test_a_client_reveals_its_shares_once_whatever_it_is_asked() -> None:
    """A server that asked again, as if others had gone, would learn both secrets of one client."""
    masked = MaskedRound(dict.fromkeys(range(4), 1.0), MASKING, number=0)
    turns = {client: MaskedTurn(client, masked.told(client), MASKING, round_number=0) for client in range(4)}
    for client, turn in turns.items():
        masked.receive(client, turn.keys())
    for _ in (KEYS, SHARES):
        for client, message in masked.end_stage().items():
            answer = turns[client].answer(message)
            if answer is not None:
                masked.receive(client, answer)
    turns[0].mask(torch.zeros(NUM_ELEMENTS, dtype=torch.float64))
    attempt = turns[0].attempt
    first = turns[0].answer(said(VECTORS, attempt, dict.fromkeys((0, 1, 2), b""), number=0))
    again = turns[0].answer(said(VECTORS, attempt, dict.fromkeys((0, 1, 3), b""), number=0))
    assert first is again
    with pytest.raises(Refused, match="goes no further"):
        MaskedTurn(0, masked.told(0), MASKING, round_number=0).answer(said(KEYS, attempt, {}, number=0))


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"clients": [0, 1], "attempt": "a", "factor": 1.0},
        {"clients": [0, 1, 1], "attempt": "a", "factor": 1.0},
        {"clients": [1, 2, 3], "attempt": "a", "factor": 1.0},
        {"clients": [0, 1, "2"], "attempt": "a", "factor": 1.0},
        {"clients": [0, 1, [2]], "attempt": "a", "factor": 1.0},
        {"clients": [0, 1, 2, -1], "attempt": "a", "factor": 1.0},
        {"clients": [0, 1, 2, 2**521 - 2], "attempt": "a", "factor": 1.0},
        {"clients": [0, 1, 2], "attempt": 4, "factor": 1.0},
        {"clients": [0, 1, 2], "attempt": "a", "factor": 0.0},
        {"clients": [0, 1, 2], "attempt": "a", "factor": 5.0},
    ],
)
def test_a_client_takes_no_part_in_a_turn_that_would_not_hide_it(told: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        MaskedTurn(0, told, MASKING, round_number=0)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"of": 3},
        {"of": [1, -2], "gone": []},
        {"of": [True], "gone": []},
        {"of": [1, 1], "gone": []},
        {"of": [1, 2, 3]},
    ],
)
def test_secrets_of_another_form_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        heard(Message(Kind.SECRETS, EPOCH, body=body, payload=[b"four"]))


def test_what_is_heard_is_what_was_said() -> None:
    secrets, gone = {3: b"ab", 1: b"cd"}, {2: b"ef"}
    message = said(UNMASKING, "attempt", secrets, gone=gone, number=7)
    assert heard(message) == (secrets, gone)
    assert bytes(raw_bytes(message.payload[0])) == b"abcdef"


def test_an_update_whose_end_comes_after_its_stage_is_dropped() -> None:
    run = Run()
    for client in range(NUM_CLIENTS):
        run.start(client)
    after(run, is_at(VECTORS))
    slow, *others = run.processes
    for _ in range(20):
        run.now_s += 1.0
        for process in run.processes:
            process.act(run.now_s)
            if process is not slow:
                process.train()
            while process.sent:
                run.hear(process)
            while process.coming:
                process.take(run.now_s)
    slow.train()
    run.hear(slow)
    run.hear(slow)
    run.now_s += DEADLINE_S
    for process in (*others, slow):
        run.core.receive(process.route, b"%d" % process.client, Message(Kind.PULSE, EPOCH).encode(), run.now_s)
    run.serve()
    assert run.core._masked is not None
    assert run.core._masked.stage == UNMASKING
    assert len(slow.sent) == 1
    run.hear(slow)
    run.calm(rounds=2)
    assert sorted(run.counted[0]) == [1, 2, 3, 4]
    assert sorted(run.counted[1]) == [0, 1, 2, 3, 4]


def test_with_more_clients_than_needed_a_round_waits_for_as_many_as_undo_the_masks() -> None:
    """Three are needed of five, and four of five have to stay for a sum."""
    run = Run(fraction=0.6, over=1.7)
    run.masking = replace(MASKING, threshold=0.8)
    run.restart()
    for client in range(NUM_CLIENTS):
        run.start(client)
    run.calm(rounds=3)
    assert [len(run.counted[number]) for number in range(3)] == [4, 4, 4]


def test_no_sum_is_of_two_clients() -> None:
    run = Run(min_clients=3)
    run.masking = replace(MASKING, threshold=0.51)
    run.restart()
    for client in range(3):
        run.start(client)
    after(run, is_at(VECTORS))
    del run.processes[0]
    for client in (3, 4):
        run.start(client)
    run.calm(rounds=1)
    assert sorted(run.counted[0]) == [1, 2, 3, 4]


def test_a_round_whose_turns_come_to_nothing_changes_nothing() -> None:
    """It would come to nothing again."""
    run = Run()
    for client in range(NUM_CLIENTS):
        run.start(client).diverges = client < 3
    run.calm(rounds=1)
    assert run.counted == {0: ()}
    for process in run.processes:
        process.diverges = False
    run.calm(rounds=1)
    assert sorted(run.counted[1]) == list(range(NUM_CLIENTS))


def test_a_client_that_gives_up_while_it_trains_says_so_once_and_takes_its_next_turn() -> None:
    """A server asks for shares before the vectors have come."""
    run = Run()
    for client in range(NUM_CLIENTS):
        run.start(client)
    after(run, lambda run: all(each.core.phase is Phase.TRAINING for each in run.processes))
    asked = run.processes[0]
    early = said(VECTORS, str(asked.core._attempt["attempt"]), dict.fromkeys(range(NUM_CLIENTS), b""), number=0)
    for _ in range(2):
        asked.core.receive(early, run.now_s)
    asked.core.send_masked(vector_of(0, 0))
    run.calm(rounds=2)
    assert sorted(run.counted[0]) == [1, 2, 3, 4]
    assert sorted(run.counted[1]) == list(range(NUM_CLIENTS))
    assert sum("takes no part in round 0" in line for line in asked.core.log) == 1
