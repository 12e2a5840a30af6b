"""Answers of a server to workers on other hosts: when each goes out."""

from __future__ import annotations

import pytest
from paceline.comm.servers.answer_window import LEAST_ANSWERS
from paceline.comm.servers.answers import AnswersElsewhere

from paceline.comm.servers import answer_window
from paceline.comm.wire import FRAME_BYTES, IN_TURN, Kind, Message

NUM_ANSWERS = LEAST_ANSWERS + 3


def answer(number: int) -> Message:
    return Message(Kind.ANSWER, epoch=1, iteration=number, payload=[bytes(FRAME_BYTES)])


@pytest.fixture
def sent() -> list[tuple[int, Message]]:
    return []


@pytest.fixture
def answers(sent: list[tuple[int, Message]], monkeypatch: pytest.MonkeyPatch) -> AnswersElsewhere:
    """Of a server that has a worker beside it, while another one's host has no server."""
    monkeypatch.setattr(answer_window, "UNDER_WAY_S", 0.0)  # as if the link were slow
    found = AnswersElsewhere(lambda worker, message: sent.append((worker, message)))
    found.are_in_turn = found.has_neighbour = found.some_are_apart = True
    return found


def test_they_go_in_order_a_few_at_a_time(answers: AnswersElsewhere, sent: list[tuple[int, Message]]) -> None:
    for number in range(NUM_ANSWERS):
        answers.send(number % 2, answer(number))
    assert len(sent) == LEAST_ANSWERS
    for worker, _ in list(sent)[: NUM_ANSWERS - LEAST_ANSWERS]:
        before = len(sent)
        assert answers.received(worker)
        assert len(sent) == before + 1
    assert [message.iteration for _, message in sent] == list(range(NUM_ANSWERS))
    assert [worker for worker, _ in sent] == [number % 2 for number in range(NUM_ANSWERS)]
    assert all(message.flags & IN_TURN for _, message in sent)


def test_word_of_an_answer_that_was_not_sent_changes_nothing(
    answers: AnswersElsewhere, sent: list[tuple[int, Message]]
) -> None:
    for number in range(NUM_ANSWERS):
        answers.send(0, answer(number))
    assert not answers.received(1)
    assert len(sent) == LEAST_ANSWERS


@pytest.mark.parametrize("lacking", ["are_in_turn", "has_neighbour", "some_are_apart"])
def test_otherwise_they_go_at_once(lacking: str, answers: AnswersElsewhere, sent: list[tuple[int, Message]]) -> None:
    setattr(answers, lacking, False)
    for number in range(NUM_ANSWERS):
        answers.send(0, answer(number))
    assert [message.iteration for _, message in sent] == list(range(NUM_ANSWERS))
    assert not any(message.flags & IN_TURN for _, message in sent)
