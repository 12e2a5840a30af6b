"""Who says nothing is known to be silent, also by a listener that pauses itself."""

from __future__ import annotations

import pytest

from paceline.engines.silence import Silence


def silent_s(silence: Silence, name: str, *, heard_s: float | None, now_s: float, has_heard_all: bool = True) -> float:
    silence.look(now_s=now_s, has_heard_all=has_heard_all)
    return silence.of(name, heard_s=heard_s)


def test_silence_lasts_since_the_last_word() -> None:
    silence = Silence(now_s=100.0, deadline_s=3.0)
    lasts_s = [silent_s(silence, "server-0", heard_s=99.5, now_s=now_s) for now_s in (100.0, 100.5, 101.0, 101.5)]
    assert lasts_s == [0.0, 0.5, 1.0, 1.5]
    lasts_s = [silent_s(silence, "server-0", heard_s=101.75, now_s=now_s) for now_s in (102.0, 102.5)]
    assert lasts_s == [0.0, 0.5]


def test_who_has_never_said_a_word_is_silent_from_the_first_look_on() -> None:
    silence = Silence(now_s=100.0, deadline_s=3.0)
    lasts_s = [silent_s(silence, "worker-3", heard_s=None, now_s=now_s) for now_s in (100.5, 101.25, 102.0)]
    assert lasts_s == [0.0, 0.75, 1.5]


def test_nobody_is_blamed_for_a_pause_of_the_listener_itself() -> None:
    """Who speaks is heard before each look, and may speak again at once, as while a disk is slow: it is not silent."""
    silence = Silence(now_s=100.0, deadline_s=3.0)
    for heard_s, now_s in ((100.0, 100.0), (100.25, 160.0), (160.25, 220.0)):
        assert silent_s(silence, "server-0", heard_s=heard_s, now_s=now_s) == 0.0
    assert silence.of("server-1", heard_s=160.25) == 0.0
    assert silent_s(silence, "server-0", heard_s=160.25, now_s=280.0) == 1.0


@pytest.mark.parametrize("pause_s", [0.75, 1.25, 5.0])
def test_a_listener_that_pauses_again_and_again_notices_silence_all_the_same(pause_s: float) -> None:
    """A launcher on a busy machine, whose every turn takes long."""
    silence = Silence(now_s=100.0, deadline_s=3.0)
    for turn in range(12):
        now_s = 100.0 + turn * pause_s
        assert silent_s(silence, "server-1", heard_s=now_s, now_s=now_s) == 0.0
        lasts_s = silence.of("server-0", heard_s=100.0)
    assert lasts_s == pytest.approx(11 * min(pause_s, 1.0))


def test_what_was_silent_before_a_pause_of_the_listener_counts() -> None:
    silence = Silence(now_s=100.0, deadline_s=3.0)
    lasts_s = [silent_s(silence, "server-0", heard_s=100.0, now_s=now_s) for now_s in (100.0, 100.75, 101.5, 110.0)]
    assert lasts_s == [0.0, 0.75, 1.5, 2.5]


def test_with_a_short_deadline_one_pause_of_the_listener_ends_nobody() -> None:
    """Of the shortest that elastic runs may have a pause is to leave the larger part."""
    silence = Silence(now_s=100.0, deadline_s=1.0)
    lasts_s = [silent_s(silence, "server-0", heard_s=100.0, now_s=now_s) for now_s in (100.0, 100.25, 110.0, 120.0)]
    assert lasts_s == pytest.approx([0.0, 0.25, 0.25 + 1 / 3, 0.25 + 2 / 3])


def test_what_has_come_and_is_not_heard_yet_may_be_anybodys() -> None:
    """A listener that does not come to the end of what was said to it blames nobody meanwhile, and does later."""
    silence = Silence(now_s=100.0, deadline_s=3.0)
    assert silent_s(silence, "server-0", heard_s=100.0, now_s=100.0) == 0.0
    for turn in range(1, 20):
        assert silent_s(silence, "server-0", heard_s=100.0, now_s=100.0 + turn, has_heard_all=False) == 0.0
    assert silent_s(silence, "server-0", heard_s=100.0, now_s=119.5) == 0.5
