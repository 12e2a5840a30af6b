"""What a worker has promised others not to do yet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.virtual.promise import Promise

SHARES = st.floats(0.01, 1.0)


def begun(share: float, *, step_s: float = 1.0) -> Promise:
    """One that has seen its first step, in which so much was computed before something was exchanged."""
    promise = Promise()
    assert promise.begin(0.0, None) is None
    promise.takes(step_s)
    promise.computed(share * step_s)
    promise.exchange(share * step_s)
    return promise


@given(
    shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=30),
    rest=st.floats(0.0, 1.0),
    steps=st.lists(st.floats(1e-6, 10.0), min_size=2, max_size=10),
    now_s=st.sampled_from([0.0, 1.0, 86_400.0, 1e6]),
)
def test_a_worker_that_exchanges_after_the_same_part_of_each_step_is_never_late(
    shares: list[float], rest: float, steps: list[float], now_s: float
) -> None:
    """Its clock moves on gradient by gradient, with as many roundings."""
    promise, whole = Promise(), sum(shares) + rest
    for number, step_s in enumerate(steps):
        until_s = promise.begin(now_s, step_s)
        promise.takes(step_s)
        began_s = now_s
        for share in shares:
            part_s = step_s * (share / whole)
            now_s += part_s
            promise.computed(part_s)
        if number:
            assert until_s is not None
            assert until_s == pytest.approx(now_s, rel=1e-11, abs=1e-6 * (now_s - began_s))
            assert promise.holds(began_s) == (until_s > began_s)
            assert not promise.holds(now_s)
        assert promise.exchange(now_s) == now_s
        assert not promise.holds(began_s)
        now_s += 0.1


@given(share=SHARES, part=st.floats(0.0, 0.99))
def test_what_comes_too_early_waits_and_nothing_is_promised_after_that(share: float, part: float) -> None:
    promise = begun(share)
    until_s = promise.begin(10.0, 2.0)
    assert until_s == pytest.approx(10.0 + share * 2.0)
    assert promise.exchange(10.0 + part * share * 2.0) == until_s
    assert promise.exchange(20.0) == 20.0
    assert promise.begin(30.0, 2.0) is None
    assert promise.exchange(30.0) == 30.0


def test_who_exchanges_before_it_computes_promises_nothing() -> None:
    assert begun(0.0).begin(10.0, 1.0) is None
    promise = Promise()
    promise.begin(0.0, None)
    promise.exchange(0.0)  # in a forward pass whose time is not known yet
    promise.takes(3.0)
    assert promise.begin(10.0, 2.0) is None


def test_only_computing_is_promised() -> None:
    """A step may have slept before it exchanged something."""
    promise = Promise()
    promise.begin(0.0, 1.0)
    promise.takes(1.0)
    promise.computed(0.5)
    promise.exchange(7.0)
    assert promise.begin(10.0, 4.0) == pytest.approx(12.0)


def test_at_most_a_step_is_promised() -> None:
    assert begun(2.5).begin(10.0, 4.0) == pytest.approx(14.0)


def test_a_step_without_exchange_leaves_what_was_promised_to_be_kept() -> None:
    promise = begun(1.0)
    promise.begin(10.0, 4.0)
    assert promise.begin(12.0, 1.0) == pytest.approx(14.0)
    assert promise.begin(13.0, 2.0) == pytest.approx(15.0)
    assert promise.exchange(15.0) == 15.0


def test_what_is_exchanged_besides_steps_is_never_late_and_teaches_nothing() -> None:
    promise = Promise()
    assert promise.exchange(3.0) == 3.0
    promise = begun(1.0)
    assert promise.exchange(5.5) == 5.5
    assert promise.begin(6.0, 1.0) == pytest.approx(7.0)


def test_who_gives_up_keeps_what_it_has_promised() -> None:
    promise = begun(1.0)
    until_s = promise.begin(10.0, 1.0)
    promise.give_up()
    assert promise.exchange(10.0) == until_s
    assert promise.begin(20.0, 1.0) is None


# --- what is promised before a batch is asked for --------------------------------------------------------------------


def compute(promise: Promise, now_s: float, step_s: float, *, next_step_s: float | None) -> float:
    """A step, up to its first exchange; returns when that is."""
    promise.begin(now_s, step_s)
    promise.takes(step_s)
    promise.computed(step_s)
    promise.next_step_s = next_step_s
    return now_s + step_s


def exchange(promise: Promise, now_s: float) -> float:
    """Something that takes 0.1; returns when it is answered."""
    now_s = promise.exchange(now_s) + 0.1
    promise.answered(now_s)
    return now_s


def trained(*next_steps_s: float | None) -> tuple[Promise, float]:
    """One that has taken so many steps with an exchange each, and the time."""
    promise, now_s = begun(1.0), 10.0
    for next_step_s in next_steps_s:
        now_s = exchange(promise, compute(promise, now_s, 1.0, next_step_s=next_step_s))
        promise.stepped()
    return promise, now_s


@given(nums=st.lists(st.integers(1, 3), min_size=3, max_size=10), step_s=st.floats(0.01, 10.0))
def test_the_next_step_is_promised_after_as_many_exchanges_as_ever(nums: list[int], step_s: float) -> None:
    """But for the first step, in which strategies set up. Who exchanges more is late."""
    promise, now_s, most = Promise(), 0.0, -1
    for number, num_exchanges in enumerate(nums):
        now_s = compute(promise, now_s, step_s, next_step_s=step_s)
        for count in range(1, num_exchanges + 1):
            is_late = promise.holds(now_s)
            assert is_late == (count - 1 == most)
            until_s = promise.until_s
            now_s = exchange(promise, now_s)
            if is_late:
                assert now_s == until_s + 0.1
            assert promise.holds(now_s) == (count == most)
            assert promise.ahead_s == (pytest.approx(step_s) if count == most else None)
        if num_exchanges == most:
            assert promise.until_s == pytest.approx(now_s + step_s)
            until_s = promise.until_s
            promise.stepped()
            assert promise.begin(now_s, step_s) == until_s
        promise.stepped()
        most = max(most, num_exchanges) if number else -1


def test_where_no_batch_follows_nothing_is_promised_or_learned() -> None:
    promise, now_s = trained(1.0, 1.0, None)
    assert not promise.holds(now_s)
    assert promise.ahead_s is None
    now_s = exchange(promise, now_s)  # as after an epoch
    now_s = exchange(promise, compute(promise, now_s, 1.0, next_step_s=2.0))
    assert promise.until_s == pytest.approx(now_s + 2.0)


def test_a_meeting_between_two_steps_is_no_part_of_them() -> None:
    promise, now_s = begun(1.0), 10.0
    for _ in range(2):
        now_s = exchange(promise, compute(promise, now_s, 1.0, next_step_s=1.0))
        promise.stepped()
        promise.end_step()
        for _ in range(5):
            now_s = exchange(promise, now_s)
    now_s = exchange(promise, compute(promise, now_s, 1.0, next_step_s=2.0))
    assert promise.until_s == pytest.approx(now_s + 2.0)


def test_who_is_late_between_steps_promises_for_their_batches_all_the_same() -> None:
    promise, now_s = trained(1.0, 1.0, 1.0)
    now_s = exchange(promise, now_s)
    for _ in range(3):
        assert promise.begin(now_s, 1.0) == pytest.approx(now_s + 1.0)
        now_s = exchange(promise, compute(promise, now_s, 1.0, next_step_s=1.0))
        promise.stepped()
        assert not promise.holds(now_s)


def test_passes_that_no_optimizer_step_follows_are_parts_of_one_step() -> None:
    promise, now_s = begun(1.0), 10.0
    for step_number in range(4):
        for part in range(3):
            now_s = exchange(promise, compute(promise, now_s, 1.0, next_step_s=1.0))
            assert promise.holds(now_s) == (step_number > 1 and part == 2)
        promise.stepped()
