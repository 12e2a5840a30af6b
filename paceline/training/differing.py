"""Workers whose models differ: how far they are from their mean, and how good each is on its own."""

import math
from typing import final

import torch

from paceline.errors import UsageError
from paceline.records import MetricRecord
from paceline.strategies.replica import named_parameters_of
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.worker_run import WorkerRun

CONSENSUS_DISTANCE = "consensus_distance"
"""The root of the mean over workers of the squared distance of their parameters to the mean model's."""


@final
class Differing:
    """One look. Made before the mean model is put in place."""

    def __init__(self, run: WorkerRun) -> None:
        self._run, self._model = run, run.prepared.replica.model
        self._own = [parameter.detach().clone() for _, parameter in named_parameters_of(self._model)]

    def record_distance(self) -> None:
        """Record the distance to the mean model, while that is in place. Collective call."""
        parts = zip(self._own, (each for _, each in named_parameters_of(self._model)), strict=True)
        apart = [own - mean.detach() for own, mean in parts if own.is_floating_point() or own.is_complex()]
        squared = sum(float(torch.linalg.vector_norm(each).double() ** 2) for each in apart)
        everyone = self._run.context.collective.all_gather_object(squared)
        if self._run.context.is_first:
            self._record(CONSENSUS_DISTANCE, math.sqrt(sum(everyone) / len(everyone)))

    def record_scores(self, evaluation: Evaluation) -> None:
        """Record, as `own_accuracy` and so on, what the worker's own model scores, once that has come back."""
        try:
            found = evaluate(evaluation, self._model, target=None, now_s=self._run.context.pacing.now_s)
        except UsageError:
            return  # the mean model's evaluation has said so to all
        for name, value in found.metrics.items():
            self._record(f"own_{name}", value)

    def _record(self, name: str, value: float) -> None:
        run = self._run
        run.reporter.emit(MetricRecord(run.context.rank, run.steps, run.iteration, run.clock.now_s, name, value))
