"""What plans say of failures: closed forms beside draws, beside limits, and beside runs of the virtual engine."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from paceline.cluster.description import Cluster, Compute, Hosts, Recovery
from paceline.planner import StepWork, failing, plan, wording

WORK = StepWork(tensor_bytes=(4_000_000,), samples=32)
HOSTS = Hosts(count=8, bandwidth_gbit_per_s=10.0, memory_gbyte_per_s=10.0, price_per_hour=2.0)
STEADY = Cluster(hosts=(HOSTS,), compute=Compute(step_s=1.0))
SPOT = replace(
    STEADY,
    hosts=(replace(HOSTS, preemptions_per_hour=0.5, notice_s=30.0, back_after_s=300.0, spot_price_per_hour=0.5),),
    recovery=Recovery(reform_s=0.5, start_s=20.0, checkpoint_s=2.0),
)


def test_the_best_interval_is_daly_s() -> None:
    """To first order sqrt(2 C M); and the minimum of what a run takes, to a thousandth."""
    assert failing.checkpoint_interval_s(1e-3, 1e6) == pytest.approx(math.sqrt(2 * 1e-3 * 1e6), rel=1e-3)
    assert failing.checkpoint_interval_s(100.0, 40.0) == 40.0
    for checkpoint_s, between_s in ((1.0, 1e4), (30.0, 3600.0), (60.0, 600.0)):

        def takes(every_s: float, checkpoint_s: float = checkpoint_s, between_s: float = between_s) -> float:
            return failing.restarted_s(
                1e5, every_s=every_s, checkpoint_s=checkpoint_s, between_s=between_s, restart_s=120.0
            )

        best_s = failing.checkpoint_interval_s(checkpoint_s, between_s)
        least = min(takes(every_s) for every_s in np.geomspace(best_s / 5, best_s * 5, 2001))
        assert takes(best_s) == pytest.approx(least, rel=1e-3)


def test_a_run_that_restarts_takes_as_long_as_one_that_is_drawn() -> None:
    draws, every_s, checkpoint_s, between_s, restart_s = random.Random(0), 100.0, 10.0, 400.0, 50.0
    took_s, num_pieces = 0.0, 20_000
    for _ in range(num_pieces):
        while (until_s := draws.expovariate(1 / between_s)) < every_s + checkpoint_s:
            took_s += until_s + restart_s
        took_s += every_s + checkpoint_s
    expected_s = failing.restarted_s(
        num_pieces * every_s, every_s=every_s, checkpoint_s=checkpoint_s, between_s=between_s, restart_s=restart_s
    )
    assert took_s == pytest.approx(expected_s, rel=0.01)


def test_without_failures_every_number_is_as_before() -> None:
    found = plan(STEADY, WORK, num_checks=0)
    assert not STEADY.can_fail
    assert not any("failures" in line for line in wording.answer(found))
    for outcome in failing.Survey(found).of(found.best):
        assert (outcome.time_s, outcome.goodput, outcome.every) == (failing.DAY_S, 1.0, None)
        workers = found.best.prediction.workers
        assert outcome.cost == pytest.approx(24 * 2.0 * workers)
    planned = plan(SPOT, WORK, num_checks=0)
    assert planned.points == found.points


def test_those_that_are_left_make_a_kept_batch_in_more_rounds() -> None:
    assert failing.kept_rates(4, compute_s=1.0, exchange_s=0.0).tolist() == [0, 0.25, 0.5, 0.75, 1]
    # Three of four do 4/3 of the computing, and exchange twice.
    assert failing.kept_rates(4, compute_s=0.9, exchange_s=0.1)[3] == pytest.approx(1 / (0.9 * 4 / 3 + 2 * 0.1))
    rates = failing.kept_rates(50, compute_s=1.0, exchange_s=0.0)
    assert failing.mean_rate(rates, away=0.2) == pytest.approx(0.8)
    assert failing.mean_rate(rates, away=0.0) == 1.0
    assert failing.shrinking_s(10.0, gone_per_s=1e-9) == pytest.approx(10.0)
    assert failing.shrinking_s(10.0, gone_per_s=0.1) == math.inf


def test_a_plan_says_what_failures_cost_and_how_often_to_save() -> None:
    found = plan(SPOT, WORK, num_checks=0)
    restart, elastic = failing.Survey(found).of(max(found.ranked, key=lambda point: point.prediction.workers))
    workers = restart.point.prediction.workers
    assert restart.between_s == pytest.approx(7200 / workers)
    checkpoint_s = 2.0 + 4_000_000 / 10e9
    assert restart.every is not None
    assert restart.every * restart.point.prediction.step_s == pytest.approx(
        failing.checkpoint_interval_s(checkpoint_s, restart.between_s), rel=0.02
    )
    assert restart.goodput < elastic.goodput < 1
    assert failing.Survey(found).first.way == "elastic"
    said = " ".join(wording.answer(found))
    assert "with --elastic, gets furthest" in said
    assert "--checkpoint-every" in said
    assert "On hosts that nobody takes away" in said
