"""Budget, cadence and target of a run."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from paceline.config import DEFAULT_EVAL_EVERY, RunConfig, Target
from paceline.errors import UsageError
from paceline.interval import Count, Interval
from paceline.training.cadence import NEVER, Cadence


@pytest.mark.parametrize(
    ("text", "metric", "value", "rising"),
    [
        ("accuracy=0.95", "accuracy", 0.95, True),
        ("accuracy>=0.95", "accuracy", 0.95, True),
        ("accuracy<=0.95", "accuracy", 0.95, False),
        ("loss=0.3", "loss", 0.3, False),
        ("loss>=0.3", "loss", 0.3, True),
        (" val_loss <= 3e-1 ", "val_loss", 0.3, False),
        ("Top5_Error=4", "Top5_Error", 4.0, False),
        ("perplexity=20", "perplexity", 20.0, False),
        ("rmse=1", "rmse", 1.0, False),
        ("val/mae=1", "val/mae", 1.0, False),
        ("test.wer=0.1", "test.wer", 0.1, False),
        ("val-nll=-2", "val-nll", -2.0, False),
        ("maestro=1", "maestro", 1.0, True),
        ("f1/macro=0.5", "f1/macro", 0.5, True),
        ("reward=-10", "reward", -10.0, True),
    ],
)
def test_targets(text: str, metric: str, value: float, rising: bool) -> None:
    target = Target.parse(text)
    assert target == Target(metric, value, rising)
    assert Target.parse(str(target)) == target
    assert target.is_reached(value)
    assert target.is_reached(value + 1) == rising
    assert target.is_reached(value - 1) != rising
    assert not target.is_reached(math.nan)


@pytest.mark.parametrize(
    "text",
    ["", "accuracy", "accuracy=", "=0.9", "accuracy=high", "accuracy==0.9", "accuracy>0.9", "9=9", "a b=1", "a=1 2"],
)
def test_texts_that_are_no_target(text: str) -> None:
    with pytest.raises(UsageError, match="is not of the form metric=value"):
        Target.parse(text)


@pytest.mark.parametrize("text", ["loss=nan", "loss<=-inf", "accuracy>=inf"])
def test_targets_that_can_never_be_reached(text: str) -> None:
    with pytest.raises(UsageError, match="can never be reached"):
        Target.parse(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 0}, "max-steps must be positive, not 0"),
        ({"max_steps": -5}, "max-steps"),
        ({"max_time_s": 0.0}, "max-time must be"),
        ({"max_time_s": math.nan}, "max-time must be"),
        ({"checkpoint_every": -1}, "checkpoint-every"),
        ({"deadline_s": 0}, "deadline must be"),
        ({"seed": -1}, "seed must be in"),
        ({"seed": 2**63}, "seed must be in"),
        ({"device": "tpu"}, "device must be auto, cpu or cuda, not 'tpu'"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunConfig(**settings)


def test_a_target_needs_evaluations() -> None:
    target = Target.parse("loss=1")
    assert RunConfig().eval_every is None
    assert RunConfig(target=target).eval_every == DEFAULT_EVAL_EVERY
    assert RunConfig(target=target, eval_every=Interval(7)).eval_every == Interval(7)
    assert RunConfig(seed=2**63 - 1, max_time_s=0.5, device="cpu").max_time_s == 0.5


@pytest.mark.parametrize("text", ["", "often", "-5", "0", "0s", "nan", "1e400", "10 minutes", "1.5", "2.5samples", "s"])
def test_intervals_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="eval-every"):
        Interval.parse(text)


def cadence_of(every: str) -> Cadence:
    cadence = Cadence(RunConfig(eval_every=Interval.parse(every)))
    cadence.evaluates = True
    return cadence


@pytest.mark.parametrize(
    ("every", "samples_each", "expected"),
    [("4", 32, [4, 8, 12]), ("100samples", 32, [4, 7, 10]), ("96samples", 32, [3, 6, 9]), ("6batches", 32, [3, 6, 9])],
)
def test_evaluations_come_with_the_first_iteration_that_completes_an_interval(
    every: str, samples_each: int, expected: list[int]
) -> None:
    """Two workers; pauses are where the cadence asks for them, and one tells how many samples an iteration has."""
    cadence, iteration, evaluated, pauses = cadence_of(every), 0, [], 0
    while iteration <= max(expected):
        now = Count(iteration, samples_each * iteration, 2 * iteration, 0.1 * iteration)
        if cadence.is_evaluation_due(now, at_end=False):
            cadence.evaluated_at = now
            evaluated.append(iteration)
        cadence.plan(now, check_at=NEVER, iterations_per_s=10.0)
        assert cadence.next_pause > iteration
        iteration, pauses = cadence.next_pause, pauses + 1
    assert evaluated == [0, *expected]
    assert pauses <= len(expected) + 2


def test_evaluations_by_seconds_follow_a_pace_that_changes() -> None:
    cadence, iteration, time_s, evaluated_s = cadence_of("3s"), 0, 0.0, []
    while time_s < 100:
        now = Count(iteration, 32 * iteration, iteration, time_s)
        if cadence.is_evaluation_due(now, at_end=False):
            cadence.evaluated_at = now
            evaluated_s.append(time_s)
        rate = 10.0 if time_s < 50 else 4.0
        cadence.plan(now, check_at=NEVER, iterations_per_s=rate)
        time_s += (cadence.next_pause - iteration) / rate
        iteration = cadence.next_pause
    assert [int(time_s // 3) for time_s in evaluated_s] == list(range(34))


@pytest.mark.parametrize("step_s", [1e-3, 0.1, 2.0, 9.0, 40.0])
@pytest.mark.parametrize("workers", [1, 2, 16])
def test_pauses_by_time_come_in_time_though_nobody_tells_the_pace_before(step_s: float, workers: int) -> None:
    """Workers that run free all take steps of one length, of which the first takes three times as long."""
    cadence, iteration, time_s, wanted_s = Cadence(RunConfig(), num_free_workers=workers), 0, 0.0, 27.0
    rate, saved_s, pauses = 0.0, [0.0], 0
    while time_s < 300:
        if time_s - saved_s[-1] >= 0.8 * wanted_s:
            saved_s.append(time_s)
        cadence.meet_in(max(0.0, wanted_s - (time_s - saved_s[-1])), iteration, iterations_per_s=rate)
        cadence.plan(Count(iteration), check_at=NEVER)
        steps = math.ceil((cadence.next_pause - iteration) / workers)
        took_s = steps * step_s + (0 if iteration else 2 * step_s)
        rate = (cadence.next_pause - iteration) / took_s
        iteration, time_s, pauses = cadence.next_pause, time_s + took_s, pauses + 1
    assert max(later - earlier for earlier, later in pairwise(saved_s)) <= max(30.0, 5 * step_s)
    assert pauses <= len(saved_s) + 10 + max(0, 9 * (step_s >= 2.0))
