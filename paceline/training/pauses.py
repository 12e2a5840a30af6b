"""Pauses: all workers meet between two steps, agree on where the run is, and look at the global model."""

import math
from typing import Any, final

from torch import nn

from paceline.errors import UsageError
from paceline.interval import Count
from paceline.records import EvaluationRecord
from paceline.strategies.meeting import gathered
from paceline.training import snapshot
from paceline.training.agreement import Agreement
from paceline.training.cadence import Cadence
from paceline.training.checkpoints import Checkpoints
from paceline.training.differing import Differing
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.holding import Streak
from paceline.training.worker_run import WorkerRun

MODEL_FILE = "model.safetensors"
_AGREE_S = 1.0


@final
class Pauses:
    """What rank 0 says of evaluation and of the time since the last checkpoint holds for all.

    Where steps do not carry a worker's wish to stop to all others (the trait `tells_stop`), workers say it here, and
    all stop at the iteration of this pause.
    """

    def __init__(self, run: WorkerRun, cadence: Cadence, checkpoints: Checkpoints) -> None:
        self._run, self._cadence, self._checkpoints = run, cadence, checkpoints
        self._agreement = Agreement(run)
        self.evaluation: Evaluation | None = None
        self.last_metrics: dict[str, float] = {}
        self._met_at = (0, 0.0)
        config = run.config
        self._streak = Streak(config.target, config.hold) if config.target is not None else None
        self._is_target_reached = False

    def require_evaluation(self) -> None:
        """Raise UsageError if the run asks for evaluations and the script has none."""
        config = self._run.config
        asked = "--target" if config.target is not None else "--eval-every" if config.eval_every else None
        if asked is not None and not self._cadence.evaluates:
            raise UsageError(f"{asked} needs an evaluation, and the script registers none: see @worker.evaluation")

    def meet(self, *, is_done: bool) -> bool:
        """Evaluate and save the global model where that is due. Collective call.

        Args:
            is_done: this worker takes no further step.

        Returns:
            Whether no worker does.

        Raises:
            UsageError: the evaluation does not return what it should, or a worker under a lock-step strategy has left
                a batch or a step out.
            TensorMismatch: lock-step workers' parameters or settings have drifted apart.
        """
        run, cadence, collective = self._run, self._cadence, self._run.context.collective
        if is_done and not run.traits.lock_step:
            collective.set_deadline(None)  # the others may have many steps to go; engines look whether they take them
        run.awaits_others = True
        reports = gathered(collective, "a pause", self._report(is_done=is_done))
        run.awaits_others = False
        self._agreement.require(reports)
        collective.set_deadline(None)  # an evaluation takes as long as it takes; who dies in it is still noticed
        first = reports[0]
        active = [rank for rank, report in enumerate(reports) if not report["done"]]
        furthest = max(report["iteration"] for report in reports)
        run.iteration = run.prepared.synchronizer.meet(furthest, active=active)
        all_done = all(report["done"] for report in reports)
        cadence.evaluates = first["evaluates"]
        now = _count(run.iteration, reports)
        evaluates = cadence.is_evaluation_due(now, at_end=all_done) and not first["interrupted"]
        saves = cadence.is_checkpoint_due(run.iteration, at_end=all_done, is_late=first["checkpoint_in_s"] <= 0)
        if evaluates or saves or all_done:
            self._look_at_global_model(now, reports, evaluates=evaluates, saves=saves, is_last=all_done)
        self._agree(now, reports, has_saved=saves)
        if not all_done:
            collective.barrier()  # rank 0 may have been busy; nobody's clock runs before all can go on
        collective.set_deadline(run.config.deadline_s)
        return all_done

    def _report(self, *, is_done: bool) -> dict[str, Any]:
        """What this worker says of itself."""
        run = self._run
        iteration, time_s = self._met_at
        elapsed_s = run.clock.now_s - time_s
        return {
            "iteration": run.iteration,
            "done": is_done,
            "time_s": run.clock.now_s,
            "samples": run.samples,
            "steps": run.steps,
            "evaluates": self.evaluation is not None,
            "interrupted": run.reporter.stop_requested(),
            "wants_stop": run.wants_stop(),
            "checkpoint_in_s": self._checkpoints.due_in_s,
            "iterations_per_s": (run.iteration - iteration) / elapsed_s if elapsed_s > 0 else 0.0,
            **self._agreement.said(is_last=is_done),
        }

    def _agree(self, now: Count, reports: list[dict[str, Any]], *, has_saved: bool) -> None:
        """Whether the run ends here, and when to meet next."""
        run, first = self._run, reports[0]
        rate = first["iterations_per_s"]
        self._met_at = (run.iteration, run.clock.now_s)
        run.has_ended = run.has_ended or self._cadence.is_over(run.iteration)
        waits_s = [self._checkpoints.next_in_s(first["checkpoint_in_s"], has_saved=has_saved)]
        if not run.traits.tells_stop:
            run.has_ended = run.has_ended or any(report["wants_stop"] for report in reports)
            left_s = (run.config.max_time_s or math.inf) - first["time_s"]
            waits_s += [_AGREE_S, left_s]
        self._cadence.meet_in(min(waits_s), run.iteration, iterations_per_s=rate)
        check_at = self._agreement.next_at(first, iterations_per_s=rate)
        self._cadence.plan(now, check_at=check_at, iterations_per_s=rate)

    def _look_at_global_model(
        self, now: Count, reports: list[dict[str, Any]], *, evaluates: bool, saves: bool, is_last: bool
    ) -> None:
        run = self._run
        time_s = sum(report["time_s"] for report in reports) / len(reports)
        own = self._checkpoints.own_part() if saves else None
        differing = Differing(run) if evaluates and run.traits.workers_differ else None
        with run.prepared.synchronizer.global_model() as model:
            if evaluates:
                self._evaluate(model, now, time_s)
            if differing is not None:
                differing.record_distance()
            if own is not None:
                self._checkpoints.save(model, own, time_s)
                self._cadence.checkpointed_at = run.iteration
            if is_last and run.context.rank == 0:
                run.reporter.save(MODEL_FILE, snapshot.as_model_file(snapshot.weights_of(model)))
        if differing is not None and run.traits.own_scores and self.evaluation is not None:
            differing.record_scores(self.evaluation)

    def _evaluate(self, model: nn.Module, now: Count, time_s: float) -> None:
        """Rank 0 calls the script's evaluation; all learn what came of it."""
        found = self._found(model, time_s, now.samples) if self._run.context.rank == 0 else None
        found = self._run.context.collective.broadcast_object(found)
        if "error" in found:
            raise UsageError(found["error"])
        self.last_metrics = found["metrics"]
        self._cadence.evaluated_at = now
        self._run.has_ended = self._run.has_ended or found["stop"]

    def _found(self, model: nn.Module, time_s: float, samples: int) -> dict[str, Any]:
        run, target = self._run, self._run.config.target
        assert self.evaluation is not None
        try:
            found = evaluate(self.evaluation, model, target=target, now_s=run.context.pacing.now_s)
        except UsageError as error:
            return {"error": str(error)}
        run.reporter.emit(EvaluationRecord(run.iteration, time_s, samples, found.metrics, found.duration_s))
        is_reached = self._is_held(found.metrics, time_s)
        return {"metrics": found.metrics, "stop": is_reached and run.config.after_target == "stop"}

    def _is_held(self, metrics: dict[str, float], time_s: float) -> bool:
        """Whether the target is reached by now; when it first is, that is told."""
        if self._streak is None or not self._streak.add(metrics, time_s):
            return self._is_target_reached
        if not self._is_target_reached:
            target = self._streak.target
            details = {"target": str(target), "value": metrics[target.metric], "held": self._streak.num}
            self._run.tell("target_reached", details, at_s=self._streak.began_s)
        self._is_target_reached = True
        return True


def _count(iteration: int, reports: list[dict[str, Any]]) -> Count:
    """How far the run is, by what workers say of themselves; rank 0's clock tells the time."""
    each = {name: sum(report[name] for report in reports) for name in ("samples", "steps")}
    return Count(iteration, each["samples"], each["steps"], reports[0]["time_s"])
