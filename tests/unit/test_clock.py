"""The training clock."""

from __future__ import annotations

import pytest

from paceline.comm.base import Timing
from paceline.training.accounting import Account
from paceline.training.clock import TrainingClock


def test_the_clock_leaves_pauses_out() -> None:
    now_s = 1000.0
    clock = TrainingClock(time_s=lambda: now_s)
    assert (clock.now_s, clock.is_running) == (0.0, False)
    now_s += 5
    assert clock.now_s == 0.0
    clock.resume()
    now_s += 2
    assert (clock.now_s, clock.is_running) == (2.0, True)
    clock.resume()  # changes nothing
    now_s += 1
    clock.pause()
    assert (clock.now_s, clock.is_running) == (3.0, False)
    now_s += 100
    clock.pause()
    assert clock.now_s == 3.0
    clock.resume()
    now_s += 0.5
    assert clock.now_s == 3.5


def test_the_clock_goes_on_from_a_checkpoint() -> None:
    now_s = 50.0
    clock = TrainingClock(time_s=lambda: now_s)
    clock.set(7.0)
    now_s += 3
    assert clock.now_s == 7.0
    clock.resume()
    now_s += 1
    assert clock.now_s == 8.0


def test_the_clock_goes_on_after_a_pause_that_failed() -> None:
    now_s, timing = 0.0, Timing()
    clock = TrainingClock(time_s=lambda: now_s)
    account = Account(clock, [timing])
    account.start()
    now_s += 2

    def fail() -> None:
        nonlocal now_s
        now_s += 100
        timing.waiting_s += 100
        raise RuntimeError("in it")

    with pytest.raises(RuntimeError, match="in it"), account.pause():
        fail()
    now_s += 1
    record = account.close_step(worker=0, step=1, iteration=1, samples=8, staleness=0)
    assert (record.time_s, record.compute_s, record.waiting_s) == (3.0, 3.0, 0.0)


def test_the_clock_runs_by_default() -> None:
    clock = TrainingClock()
    clock.resume()
    first = clock.now_s
    while clock.now_s == first:
        pass
    assert 0 <= first < clock.now_s < 60
