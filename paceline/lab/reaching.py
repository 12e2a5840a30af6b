"""When a run reached a target, from its evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import Target
from paceline.records import EvaluationRecord
from paceline.training.holding import Streak


@dataclass(frozen=True)
class Reaching:
    """The target was reached at an evaluation, or somewhere between it and the one before."""

    evaluation: EvaluationRecord
    resolution_s: float
    """Time since the evaluation before, or since the start."""


def first_reaching(evaluations: Sequence[EvaluationRecord], target: Target, hold: int | None) -> Reaching | None:
    """The first of those evaluations in a row that held the target; none: none did."""
    streak = Streak(target, hold)
    for place, evaluation in enumerate(evaluations):
        if streak.add(evaluation.metrics, evaluation.time_s):
            first = place + 1 - streak.num
            before_s = evaluations[first - 1].time_s if first else 0.0
            return Reaching(evaluations[first], evaluations[first].time_s - before_s)
    return None
