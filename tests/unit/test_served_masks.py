"""Updates of a served run under masks: the sum is right or there is none, whatever is lost and whoever goes, and what
the server is sent tells nothing of one client's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
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
from paceline.served.client_core import Phase
from paceline.served.form import EPOCH, Form, Refused
from paceline.served.masked_round import MaskedRound, Sum
from paceline.served.masked_turn import MaskedTurn
from paceline.served.masking import KEYS, SHARES, UNMASKING, VECTORS, Masking, heard, said
from paceline.served.rules import Rules
from paceline.served.server_core import ServerCore
from tests.unit.served_run import (
    DEADLINE_S,
    PRESENCE_S,
    VECTOR,
    Process,
    Run,
    actions_among,
    key_of,
    samples_of,
    small_pieces,  # noqa: F401 - for every test
)

NUM_CLIENTS, NUM_ELEMENTS, CLIP = 5, 6, 8.0
WORDS = Form((TensorSpec("words", (NUM_ELEMENTS,), torch.int32),))
MASKING = Masking(clip=CLIP, num_neighbours=None, threshold=0.6, least=3, num_elements=NUM_ELEMENTS, seed=3)


def vector_of(client: int, number: int) -> Tensor:
    return torch.linspace(-1, 1, NUM_ELEMENTS, dtype=torch.float64) * (client + 1) + 0.1 * number


class MaskedProcess(Process):
    def __init__(self, client: int, route: bytes, masking: Masking) -> None:
        super().__init__(client, route)
        self.masking, self.diverges = masking, False

    def attach(self) -> None:
        self.core.attach(
            VECTOR,
            WORDS,
            samples=samples_of(self.client),
            mask=lambda told, number: MaskedTurn(self.client, told, self.masking, round_number=number),
        )

    def send(self, number: int) -> None:
        vector = vector_of(self.client, number)
        self.core.send_masked(vector * torch.nan if self.diverges else vector)


class MaskedRun(Run):
    def __init__(
        self,
        *,
        masking: Masking = MASKING,
        min_clients: int = NUM_CLIENTS,
        fraction: float = 1.0,
        over: float = 1.0,
        starts: int = NUM_CLIENTS,
    ) -> None:
        self.masking = masking
        super().__init__(min_clients=min_clients, fraction=fraction, over=over, least=3)
        for client in range(starts):
            self.start(client)

    def made_core(self, **settings: Any) -> ServerCore:
        return super().made_core(
            update=WORDS, mask=lambda weights, number: MaskedRound(weights, self.masking, number=number), **settings
        )

    def made_process(self, client: int, route: bytes) -> MaskedProcess:
        return MaskedProcess(client, route, self.masking)

    def end_round(self) -> None:
        core, found = self.core, self.core.sum
        if found is not None:
            self.check_sum(found)
            for client in found.clients:
                self.accept(client)
        core.close(self.now_s)
        if not core.begins_again:
            self.next_round()

    def check_sum(self, found: Sum) -> None:
        assert len(found.clients) >= 3
        largest = max(samples_of(client) for client in self.core._turns)
        weights = {client: samples_of(client) / largest for client in found.clients}
        wanted = sum(weight * vector_of(client, self.number) for client, weight in weights.items())
        torch.testing.assert_close(found.vector, wanted, rtol=0.0, atol=1e-6)
        assert found.weight == pytest.approx(sum(weights.values()))


def test_clients_that_stay_are_all_in_every_sum() -> None:
    run = MaskedRun()
    run.calm(rounds=3)
    assert [sorted(run.accepted[number]) for number in range(3)] == [list(range(NUM_CLIENTS))] * 3
    assert run.log == [f"is there, with {samples_of(client)} samples" for client in range(NUM_CLIENTS)]


@pytest.mark.parametrize(("fraction", "fewest"), [(1.0, 3), (0.5, 6), (0.25, 11)])
def test_a_round_waits_until_those_who_are_drawn_hide_one_another(fraction: float, fewest: int) -> None:
    rules = Rules(sampler=Uniform(), fraction=fraction, seed=0, least=3)
    assert rules.fewest == fewest
    assert round(fraction * fewest) >= 3 > round(fraction * (fewest - 1))


@settings(deadline=None)
@given(actions=actions_among(NUM_CLIENTS), rubbish=st.binary(max_size=40), stage=st.integers(0, 5))
def test_whatever_happens_a_sum_is_right_and_rounds_go_on(
    actions: list[tuple[str, int]], rubbish: bytes, stage: int
) -> None:
    run = MaskedRun(min_clients=3)

    def secrets_of(process: Process) -> list[Any]:
        attempt = str(process.core._attempt.get("attempt"))
        return said(stage, attempt, {process.client: rubbish}, number=run.number).encode()

    run.play(actions, secrets_of)
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
    run = MaskedRun()
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
        assert sorted(run.accepted[0]) == [*([0] if had_sent else []), 1, 2, 3, 4]


def test_words_that_are_lost_are_said_again() -> None:
    """Every message of secrets is lost once, either way."""
    run = MaskedRun()
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
            run.hear_all(process)
            lose(process, "in", process.coming)
            while process.coming:
                process.take(run.now_s)
    assert run.number >= 1
    assert sorted(run.accepted[0]) == list(range(NUM_CLIENTS))
    assert len(lost) == 6 * NUM_CLIENTS  # three of its own, three of the server's


def with_shares(masking: Masking) -> tuple[MaskedRound, dict[int, MaskedTurn]]:
    """A round of four clients, and their ends, each of which has all secrets."""
    masked = MaskedRound(dict.fromkeys(range(4), 1.0), masking, number=0)
    turns = {client: MaskedTurn(client, masked.told(client), masking, round_number=0) for client in range(4)}
    for client, turn in turns.items():
        masked.receive(client, turn.keys())
    for _ in (KEYS, SHARES):
        for client, message in masked.end_stage().items():
            answer = turns[client].answer(message)
            if answer is not None:
                masked.receive(client, answer)
    return masked, turns


def test_what_the_server_is_sent_tells_nothing_of_one_client() -> None:
    """All updates are zero: what travels in place of them takes every value of a byte equally often."""
    num_elements = 16_384
    masking = Masking(clip=CLIP, num_neighbours=None, threshold=0.6, least=3, num_elements=num_elements, seed=3)
    masked, turns = with_shares(masking)
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
    masked, turns = with_shares(MASKING)
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
    run = MaskedRun()
    after(run, is_at(VECTORS))
    slow, *others = run.processes
    for _ in range(20):
        run.now_s += 1.0
        for process in run.processes:
            process.act(run.now_s)
            if process is not slow:
                process.train()
            run.exchange(process)
    slow.train()
    run.hear(slow)  # the first piece of two
    run.now_s += DEADLINE_S
    for process in (*others, slow):
        run.core.receive(process.route, key_of(process.client), Message(Kind.PULSE, EPOCH).encode(), run.now_s)
    run.serve()
    assert run.core._masked is not None
    assert run.core._masked.stage == UNMASKING
    assert len(slow.sent) == 1
    run.hear(slow)
    run.calm(rounds=2)
    assert sorted(run.accepted[0]) == [1, 2, 3, 4]
    assert sorted(run.accepted[1]) == [0, 1, 2, 3, 4]


def test_with_more_clients_than_needed_a_round_waits_for_as_many_as_undo_the_masks() -> None:
    """Three are needed of five, and four of five have to stay for a sum."""
    run = MaskedRun(masking=replace(MASKING, threshold=0.8), fraction=0.6, over=1.7)
    run.calm(rounds=3)
    assert [len(run.accepted[number]) for number in range(3)] == [4, 4, 4]


def test_no_sum_is_of_two_clients() -> None:
    run = MaskedRun(masking=replace(MASKING, threshold=0.51), min_clients=3, starts=3)
    after(run, is_at(VECTORS))
    del run.processes[0]
    for client in (3, 4):
        run.start(client)
    run.calm(rounds=1)
    assert sorted(run.accepted[0]) == [1, 2, 3, 4]


def test_a_round_whose_turns_come_to_nothing_changes_nothing() -> None:
    """It would come to nothing again."""
    run = MaskedRun()
    diverging = [process for process in run.processes if isinstance(process, MaskedProcess) and process.client < 3]
    for process in diverging:
        process.diverges = True
    run.calm(rounds=1)
    assert run.accepted == {0: []}
    for process in diverging:
        process.diverges = False
    run.calm(rounds=1)
    assert sorted(run.accepted[1]) == list(range(NUM_CLIENTS))


def test_a_client_that_gives_up_while_it_trains_says_so_once_and_takes_its_next_turn() -> None:
    """A server asks for shares before the vectors have come."""
    run = MaskedRun()
    after(run, lambda run: all(each.core.phase is Phase.TRAINING for each in run.processes))
    asked = run.processes[0]
    early = said(VECTORS, str(asked.core._attempt["attempt"]), dict.fromkeys(range(NUM_CLIENTS), b""), number=0)
    for _ in range(2):
        asked.core.receive(early, run.now_s)
    asked.core.send_masked(vector_of(0, 0))
    run.calm(rounds=2)
    assert sorted(run.accepted[0]) == [1, 2, 3, 4]
    assert sorted(run.accepted[1]) == list(range(NUM_CLIENTS))
    assert sum("takes no part in round 0" in line for line in asked.core.log) == 1
