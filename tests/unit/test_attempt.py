"""A wait that ends from outside."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from paceline.comm.attempt import _Call, attempt
from paceline.errors import PeerLost
from tests.threads import started_since

WITHIN_S = 60.0


class Thing:
    """What can be seen to go."""


def go_on() -> None:
    """Nothing keeps the wait from going on."""


def give_up() -> None:
    raise PeerLost("somebody is gone")


def test_what_is_made_is_returned_and_what_is_raised_is_raised() -> None:
    dropped: list[int] = []
    assert attempt(lambda: 7, check=go_on, drop=dropped.append) == 7
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 // 0, check=go_on, drop=dropped.append)
    assert not dropped


def test_what_comes_too_late_is_dropped() -> None:
    before = set(threading.enumerate())
    may_end, dropped = threading.Event(), list[int]()

    def make() -> int:
        assert may_end.wait(WITHIN_S)
        return 7

    with pytest.raises(PeerLost, match="somebody is gone"):
        attempt(make, check=give_up, drop=dropped.append)
    assert not dropped
    may_end.set()
    assert not started_since(before)
    assert dropped == [7]


def test_a_failure_to_drop_does_not_replace_what_is_raised() -> None:
    """The wait is over, and what was made is there, as the check raises."""
    before = set(threading.enumerate())

    def check_when_made() -> None:
        assert not started_since(before)
        raise PeerLost("somebody is gone")

    def fail(late: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(PeerLost, match="somebody is gone") as raised:
        attempt(make_slowly, check=check_when_made, drop=fail)
    assert isinstance(raised.value.__context__, ZeroDivisionError)


def make_slowly() -> int:
    """The one who waits looks at least once."""
    time.sleep(0.3)
    return 7


def test_what_is_made_is_dropped_where_the_wait_is_interrupted_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(call: _Call[int]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(_Call, "result", interrupted)
    dropped: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        attempt(lambda: 7, check=go_on, drop=dropped.append)
    assert dropped == [7]


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_failure_keeps_nothing_alive(is_awaited: bool) -> None:
    """As a group that was connected in part, which goes with the frames that made it."""
    before = set(threading.enumerate())
    may_end, made = threading.Event(), list[weakref.ref[Thing]]()

    def make() -> int:
        thing = Thing()
        made.append(weakref.ref(thing))
        assert may_end.wait(WITHIN_S)
        raise ZeroDivisionError

    gc.disable()
    try:
        if is_awaited:
            may_end.set()
        with pytest.raises(ZeroDivisionError if is_awaited else PeerLost):
            attempt(make, check=go_on if is_awaited else give_up, drop=lambda late: None)
        may_end.set()
        assert not started_since(before)
        assert made[0]() is None
    finally:
        gc.enable()
