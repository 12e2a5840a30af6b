"""What rank 0 finds when it judges models, and whether the run's target is reached by that."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import nn

from paceline.errors import UsageError
from paceline.interval import Count
from paceline.records import EvaluationRecord
from paceline.training import snapshot
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.holding import Streak
from paceline.training.kept_models import KeptModel, KeptModels
from paceline.training.worker_run import WorkerRun


@final
class Judge:
    """Calls the script's evaluation, on rank 0; all learn what came of it."""

    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self.evaluation: Evaluation | None = None
        self.last_metrics: dict[str, float] = {}
        config = run.config
        self._streak = Streak(config.target, config.hold) if config.target is not None else None
        self._is_target_reached = False
        self._judged: tuple[int, dict[str, float]] | None = None  # the iteration, and what was found

    @property
    def ends_run(self) -> bool:
        """Whether a target that is reached does."""
        return self._streak is not None and self._run.config.after_target == "stop"

    def judge(self, model: nn.Module, now: Count | None, time_s: float, kept: KeptModels) -> None:
        """Judge the models that were kept, and the one in place. Collective call.

        Args:
            now: how far the run is, if the model in place is to be judged.
            time_s: the training clock's time of that model.

        Raises:
            UsageError: the evaluation does not return what it should.
        """
        found: dict[str, Any] | None = None
        if self._run.context.is_first:
            try:
                found = self._found(model, now, time_s, kept)
            except UsageError as error:
                found = {"error": str(error)}
        found = self._run.context.collective.broadcast_object(found)
        if "error" in found:
            raise UsageError(found["error"])
        self.last_metrics = found["metrics"]
        self._run.has_ended = self._run.has_ended or found["stop"]

    def _found(self, model: nn.Module, now: Count | None, time_s: float, kept: KeptModels) -> dict[str, Any]:
        metrics = self.last_metrics
        before = self._run.iteration if now is not None else self._run.iteration + 1
        for earlier in kept.taken(before=before):
            if not (
                self._is_target_reached and self.ends_run
            ):  # else the run ends, and others were trained for nothing
                with _in_place(earlier, model):
                    metrics = self._evaluated(model, earlier.at, earlier.at.s)
        if now is not None:
            metrics = self._evaluated(model, now, time_s)
        return {"metrics": metrics, "stop": self._is_target_reached and self.ends_run}

    def _evaluated(self, model: nn.Module, at: Count, time_s: float) -> dict[str, float]:
        run = self._run
        assert self.evaluation is not None
        if self._judged is not None and self._judged[0] == at.iterations:
            return self._judged[1]  # a pause that is repeated, since a worker has died in it
        found = evaluate(self.evaluation, model, target=run.config.target, now_s=run.context.pacing.now_s)
        measures = run.prepared.synchronizer.measures
        if taken := found.metrics.keys() & measures.keys():
            raise UsageError(f"the evaluation returns {min(taken)!r}, which this run records itself; call it otherwise")
        metrics = {**found.metrics, **measures}
        run.reporter.emit(EvaluationRecord(at.iterations, time_s, at.samples, metrics, found.duration_s))
        if self._streak is not None and self._streak.add(found.metrics, time_s) and not self._is_target_reached:
            self._is_target_reached = True
            target = self._streak.target
            details = {"target": str(target), "value": found.metrics[target.metric], "held": self._streak.num}
            run.tell("target_reached", details, at_s=self._streak.began_s)
        self._judged = at.iterations, metrics
        return metrics


@contextmanager
def _in_place(kept: KeptModel, model: nn.Module) -> Iterator[None]:
    """The model holds what was kept meanwhile, and afterwards what it held."""
    before = snapshot.weights_of(model)
    try:
        model.load_state_dict({**model.state_dict(), **kept.weights})
        yield
    finally:
        model.load_state_dict({**model.state_dict(), **before})
