"""How much may be under way, to a server and from one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.windows import UNDER_WAY_S, AnswerWindow, SendWindow

LEAST = 4.0


@dataclass
class Clock:
    now_s: float = 0.0


def sent(window: AnswerWindow[int], clock: Clock) -> int:
    return len(list(window.take(clock.now_s)))


@given(
    bytes_per_s=st.floats(1.0, 1e5),
    way_s=st.floats(0.0, 0.9 * UNDER_WAY_S),
    num_answers=st.integers(1, 300),
)
def test_what_a_link_carries_in_the_time_is_under_way(bytes_per_s: float, way_s: float, num_answers: int) -> None:
    """Answers of one byte pass a link one after the other, and it takes a while to hear of them."""
    clock = Clock()
    window: AnswerWindow[int] = AnswerWindow(least_bytes=LEAST)
    for number in range(num_answers):
        window.put(0, number, 1.0)
    free_s, arrivals_s, most = 0.0, [], 0
    num_sent = 0
    while num_sent < num_answers or arrivals_s:
        num_new = sent(window, clock)
        for _ in range(num_new):
            free_s = max(free_s, clock.now_s) + 1 / bytes_per_s
            arrivals_s.append(free_s + way_s)
        num_sent += num_new
        most = max(most, len(arrivals_s))
        assert not num_new or len(arrivals_s) <= window.limit_bytes
        clock.now_s = arrivals_s.pop(0)
        window.answered(0, clock.now_s)
    assert num_sent == num_answers
    assert most <= max(LEAST, bytes_per_s * UNDER_WAY_S + 1)


def test_a_fast_link_is_found_out() -> None:
    """A thousand answers a second, heard of after 0.1 s: four are too few, and 300 are under way in the end."""
    clock = Clock()
    window: AnswerWindow[int] = AnswerWindow(least_bytes=LEAST)
    for number in range(3000):
        window.put(0, number, 1.0)
    free_s, arrivals_s = 0.0, []
    while clock.now_s < 2.0:
        for _ in range(sent(window, clock)):
            free_s = max(free_s, clock.now_s) + 1e-3
            arrivals_s.append(free_s + 0.1)
        clock.now_s = arrivals_s.pop(0)
        window.answered(0, clock.now_s)
    assert window.limit_bytes == pytest.approx(1000 * UNDER_WAY_S, rel=0.02)


def test_a_link_that_slows_down_is_found_out() -> None:
    clock = Clock()
    window: AnswerWindow[int] = AnswerWindow(least_bytes=LEAST)
    for number in range(200):
        window.put(0, number, 1.0)
    assert sent(window, clock) == 4
    for _ in range(50):
        clock.now_s += 1e-3
        window.answered(0, clock.now_s)
        sent(window, clock)
    assert window.limit_bytes == 50
    for _ in range(10):
        clock.now_s += 0.2
        window.answered(0, clock.now_s)
        sent(window, clock)
    assert window.limit_bytes == LEAST


def test_silence_for_want_of_answers_says_nothing_of_the_link() -> None:
    clock = Clock()
    window: AnswerWindow[int] = AnswerWindow(least_bytes=LEAST)
    for number in range(20):
        window.put(0, number, 1.0)
        sent(window, clock)
    for _ in range(20):
        clock.now_s += 1e-3
        window.answered(0, clock.now_s)
        sent(window, clock)
    assert window.limit_bytes == 20
    clock.now_s += 100.0
    window.put(0, 0, 1.0)
    assert sent(window, clock) == 1
    window.answered(0, clock.now_s)
    assert window.limit_bytes == 20


def test_word_of_nothing_changes_nothing() -> None:
    window: AnswerWindow[int] = AnswerWindow(least_bytes=LEAST)
    assert not window.answered(0, 0.0)
    assert window.limit_bytes == LEAST
    window.put(0, 0, 9.0)
    assert sent(window, Clock()) == 1  # larger than what may be under way: alone


def test_workers_speak_for_their_own_answers() -> None:
    window: AnswerWindow[str] = AnswerWindow(least_bytes=LEAST)
    for worker in range(6):
        window.put(worker, f"to {worker}", 1.0)
    assert list(window.take(0.0)) == [(worker, f"to {worker}") for worker in range(4)]
    assert not window.answered(5, 0.0)  # its answer has not gone
    assert list(window.take(0.0)) == []
    assert window.answered(3, 0.0)
    assert not window.answered(3, 0.0)
    assert list(window.take(0.0)) == [(4, "to 4")]


# --- to a server ------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 100), max_size=40), limit=st.integers(1, 120), data=st.data())
def test_everything_goes_in_order_and_never_more_than_the_limit(
    sizes: list[int], limit: int, data: st.DataObject
) -> None:
    window: SendWindow[int] = SendWindow(limit_bytes=limit)
    for index, size in enumerate(sizes):
        window.put(index, size)
    sent = list(window.take())
    num_answered = 0
    while num_answered < len(sent):
        under_way = sizes[num_answered : len(sent)]
        assert sum(under_way) <= limit or len(under_way) == 1
        for _ in range(data.draw(st.integers(1, len(under_way)))):
            window.answered()
            num_answered += 1
        sent += window.take()
    assert sent == list(range(len(sizes)))


def test_the_next_goes_when_it_fits() -> None:
    window: SendWindow[str] = SendWindow(limit_bytes=4)
    for name, num_bytes in (("a", 2), ("b", 2), ("c", 3), ("too large", 9), ("d", 1)):
        window.put(name, num_bytes)
    assert list(window.take()) == ["a", "b"]
    window.answered()
    assert list(window.take()) == []
    window.answered()
    assert list(window.take()) == ["c"]
    window.answered()
    assert list(window.take()) == ["too large"]
    assert list(window.take()) == []
    window.answered()
    assert list(window.take()) == ["d"]


def test_without_a_limit_all_go_at_once() -> None:
    window: SendWindow[int] = SendWindow(limit_bytes=math.inf)
    for index in range(5):
        window.put(index, 10**9)
    assert list(window.take()) == [0, 1, 2, 3, 4]
    window.answered()
    assert list(window.take()) == []
