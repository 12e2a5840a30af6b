"""When a trial reached the target: at the first evaluation that did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import Target
from paceline.records import EvaluationRecord


@dataclass(frozen=True)
class Reaching:
    """The target was reached at an evaluation, or somewhere between it and the one before."""

    evaluation: EvaluationRecord
    resolution_s: float
    """Since the evaluation before, or since the start."""


def first_reaching(evaluations: Sequence[EvaluationRecord], target: Target) -> Reaching | None:
    """None: no evaluation reached the target."""
    before_s = 0.0
    for evaluation in evaluations:
        if target.is_reached(evaluation.metrics.get(target.metric, math.nan)):
            return Reaching(evaluation, evaluation.time_s - before_s)
        before_s = evaluation.time_s
    return None
