"""Who makes no step while others wait: only those are named, and only while somebody waits."""

from __future__ import annotations

from paceline.engines.standstill import Standstill


def test_nobody_stands_still_while_nobody_waits() -> None:
    standstill = Standstill()
    for now_s in range(100):
        standstill.hear("worker-0", num_steps=3, awaits_others=False, now_s=now_s)
    assert standstill.still_for("worker-0", now_s=100.0) == 0.0


def test_counts_from_the_last_step_or_from_when_somebody_waits() -> None:
    standstill = Standstill()
    standstill.hear("worker-0", num_steps=9, awaits_others=False, now_s=0.0)
    standstill.hear("worker-1", num_steps=3, awaits_others=False, now_s=1.0)
    standstill.hear("worker-0", num_steps=9, awaits_others=True, now_s=4.0)
    standstill.hear("worker-0", num_steps=9, awaits_others=True, now_s=9.0)
    assert standstill.still_for("worker-1", now_s=10.0) == 6.0
    assert standstill.still_for("worker-0", now_s=10.0) == 0.0  # it waits itself
    standstill.hear("worker-1", num_steps=4, awaits_others=False, now_s=11.0)
    assert standstill.still_for("worker-1", now_s=13.0) == 2.0


def test_who_waits_no_longer_is_waited_for_no_longer() -> None:
    standstill = Standstill()
    standstill.hear("worker-1", num_steps=3, awaits_others=False, now_s=0.0)
    standstill.hear("worker-0", num_steps=9, awaits_others=True, now_s=0.0)
    standstill.hear("worker-0", num_steps=9, awaits_others=False, now_s=50.0)
    assert standstill.still_for("worker-1", now_s=60.0) == 0.0


def test_who_was_never_heard_of_is_not_named() -> None:
    standstill = Standstill()
    standstill.hear("worker-0", num_steps=9, awaits_others=True, now_s=0.0)
    assert standstill.still_for("worker-1", now_s=60.0) == 0.0
