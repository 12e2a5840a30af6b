"""What of all workers' time was of use, as a run's events tell it."""

from __future__ import annotations

import math

import pytest

from paceline.records import EventRecord
from paceline.running.goodput import Goodput


def told(name: str, **details: object) -> EventRecord:
    return EventRecord(name, "run", 1, 1.0, details)


def test_a_real_run_has_waited_with_all_that_were_left() -> None:
    died = told("reformed", took_s=0.5, ranks=[0, 2, 3], joined=[])
    joined = told("reformed", took_s=0.25, ranks=[0, 2, 3, 4], joined=[4])
    found = Goodput.of([died, joined], worker_s=lambda: 90.0)
    assert found is not None
    assert found.regrouping == pytest.approx(3 * 0.75 / 90)
    assert found.goodput == pytest.approx(1 - found.regrouping)
    assert math.isnan(found.starting)


def test_a_simulated_run_has_counted_itself_also_where_it_was_resumed() -> None:
    first = told("goodput", worker_s=60.0, lost_regrouping_s=6.0, lost_steps_s=3.0, lost_starting_s=0.0, cost=1.0)
    second = told("goodput", worker_s=40.0, lost_regrouping_s=0.0, lost_steps_s=0.0, lost_starting_s=11.0, cost=2.0)
    found = Goodput.of([first, second], worker_s=lambda: 0.0)
    assert found == Goodput(pytest.approx(0.8), 0.06, 0.03, 0.11, 3.0)


def test_nothing_is_told_where_nobody_could_die() -> None:
    assert Goodput.of([told("training")], worker_s=lambda: 90.0) is None
