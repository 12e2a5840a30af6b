"""What rank 0 finds when it judges models, and whether the run's target is reached by that."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, final

from torch import nn

from paceline.errors import UsageError, unknown
from paceline.hooks import place_in_script
from paceline.interval import Count
from paceline.records import EvaluationRecord
from paceline.training import snapshot
from paceline.training.evaluating import Evaluating
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.holding import Streak
from paceline.training.kept_models import KeptModel, KeptModels
from paceline.training.unchanged import unchanged
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
        self._scored: tuple[int, float] | None = None
        self._best: tuple[int, float] | None = None
        self._judged: EvaluationRecord | None = None  # of the last model that was in place, as all workers know
        self._recorded_at = -1  # the iteration of the last record of this worker's

    @property
    def ends_run(self) -> bool:
        """Whether a target that is reached does."""
        return self._streak is not None and self._run.config.after_target == "stop"

    @property
    def chooses_best(self) -> bool:
        """Whether evaluations say which checkpoint is to be kept as the best."""
        return self._run.config.keep_best is not None

    @property
    def has_best_here(self) -> bool:
        """Whether the global model of this iteration is the best so far, as all workers know."""
        return self._best is not None and self._best[0] == self._run.iteration

    @property
    def score(self) -> dict[str, float]:
        """By which the best checkpoint is chosen, if the global model of this iteration was evaluated."""
        best = self._run.config.keep_best
        if best is None or self._scored is None or self._scored[0] != self._run.iteration:
            return {}
        return {best.metric: self._scored[1]}

    def state(self) -> dict[str, Any]:
        """What evaluations have found so far, as plain data."""
        return {"metrics": self.last_metrics, "best": self._best and list(self._best)}

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Judge from here on as those do who gave this."""
        self.last_metrics = dict(state["metrics"])
        self._best = None if state["best"] is None else (state["best"][0], state["best"][1])

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
        if now is not None:
            self._judged = EvaluationRecord(**found["judged"])
        best = self._run.config.keep_best
        if best is not None and now is not None and self._run.iteration > 0:  # untrained models are not kept
            value, before = self.last_metrics[best.metric], self._best
            self._scored = (self._run.iteration, value)
            if best.is_better(value, None if before is None else before[1]):
                self._best = self._scored
        self._run.has_ended = self._run.has_ended or found["stop"]

    def _found(self, model: nn.Module, now: Count | None, time_s: float, kept: KeptModels) -> dict[str, Any]:
        metrics = self.last_metrics
        before = self._run.iteration if now is not None else self._run.iteration + 1
        for earlier in kept.taken(before=before):
            if not (
                self._is_target_reached and self.ends_run
            ):  # else the run ends, and others were trained for nothing
                metrics = self._judged_earlier(earlier, model, kept) or metrics
        judged = None if now is None else self._evaluated(model, now, time_s)
        return {
            "metrics": metrics if judged is None else judged.metrics,
            "judged": None if judged is None else asdict(judged),
            "stop": self._is_target_reached and self.ends_run,
        }

    def _judged_earlier(self, earlier: KeptModel, model: nn.Module, kept: KeptModels) -> dict[str, float] | None:
        """None where it cannot be, since the script has changed the model's tensors meanwhile, as by pruning."""
        with unchanged(model):
            strange = snapshot.put_in_place(model, earlier.weights)
            if strange is None:
                return self._evaluated(model, earlier.at, earlier.at.s, is_put_back=True).metrics
        kept.leave_out()
        place_in_script().warn(
            f"the model of iteration {earlier.at.iterations} is not evaluated: it was kept to be judged later, and "
            f"since then the script has changed the model, in which {strange!r} is new, gone or of another shape; "
            "change it before prepare, or use --keep-best, with which all workers wait for evaluations"
        )
        return None

    def _evaluated(self, model: nn.Module, at: Count, time_s: float, *, is_put_back: bool = False) -> EvaluationRecord:
        run = self._run
        assert self.evaluation is not None
        if self._judged is not None and self._judged.iteration == at.iterations:
            # A pause that is repeated, since a worker has died in it: if that was the first, perhaps with the record.
            self._record(self._judged)
            return self._judged
        with self._evaluating(model):
            found = evaluate(
                self.evaluation,
                model,
                target=run.config.target,
                now_s=run.context.pacing.now_s,
                is_put_back=is_put_back,
            )
        kept_by = run.config.keep_best
        if kept_by is not None and kept_by.metric not in found.metrics:
            raise unknown("metric of --keep-best", kept_by.metric, found.metrics)
        measures = run.prepared.synchronizer.measures
        if taken := found.metrics.keys() & measures.keys():
            raise UsageError(f"the evaluation returns {min(taken)!r}, which this run records itself; call it otherwise")
        metrics = {**found.metrics, **measures}
        record = EvaluationRecord(at.iterations, time_s, at.samples, metrics, found.duration_s)
        self._record(record)
        if self._streak is not None and self._streak.add(found.metrics, time_s) and not self._is_target_reached:
            self._is_target_reached = True
            target = self._streak.target
            details = {"target": str(target), "value": found.metrics[target.metric], "held": self._streak.num}
            run.tell("target_reached", details, at_s=self._streak.began_s)
        self._judged = record
        return record

    def _record(self, record: EvaluationRecord) -> None:
        if record.iteration != self._recorded_at:
            self._recorded_at = record.iteration
            self._run.reporter.emit(record)

    @contextmanager
    def _evaluating(self, model: nn.Module) -> Iterator[None]:
        run = self._run
        watch = Evaluating(rank=run.context.rank).watch(model) if run.context.size > 1 else nullcontext()
        run.is_evaluating = True
        try:
            with watch:
                yield
        finally:
            run.is_evaluating = False
