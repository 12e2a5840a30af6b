"""Budget, cadence and target of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.config import DEFAULT_EVAL_EVERY, RunConfig, Target
from paceline.errors import UsageError


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
        ({"eval_every": 0}, "eval-every"),
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
    assert RunConfig(target=target, eval_every=7).eval_every == 7
    assert RunConfig(seed=2**63 - 1, max_time_s=0.5, device="cpu").max_time_s == 0.5
