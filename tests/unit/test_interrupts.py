"""Interrupts that come in the midst of what must be done."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from paceline.engines.ray.interrupts import Insisted, hold_back_interrupts


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """As in a process of its own: a test may run in the background of a shell, which has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def held_back(done: list[str], *, times: int, **patience: float) -> None:
    with hold_back_interrupts(**patience):
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        done.append("the rest")


def test_an_interrupt_is_raised_when_all_is_done() -> None:
    done = list[str]()
    with pytest.raises(KeyboardInterrupt) as raised:
        held_back(done, times=1, patience=1)
    assert done == ["the rest"]
    assert not isinstance(raised.value, Insisted)


def test_who_interrupts_again_does_not_wait_and_is_known() -> None:
    done = list[str]()
    with pytest.raises(Insisted):
        held_back(done, times=2, patience=1)
    assert not done


def test_any_number_waits_where_nothing_may_be_left_undone() -> None:
    done = list[str]()
    with pytest.raises(KeyboardInterrupt) as raised:
        held_back(done, times=3)
    assert done == ["the rest"]
    assert not isinstance(raised.value, Insisted)
