"""Pauses: all workers meet between two steps, agree on where the run is, and look at the global model."""

from typing import Any, final

from torch import nn

from paceline.errors import UsageError
from paceline.records import EvaluationRecord
from paceline.training import snapshot
from paceline.training.cadence import Cadence
from paceline.training.checkpoints import Checkpoints
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.worker_run import WorkerRun

MODEL_FILE = "model.safetensors"


@final
class Pauses:
    """What rank 0 says of evaluation and of the time since the last checkpoint holds for all.

    Where steps do not carry a worker's wish to stop to all others (the trait `tells_stop`), workers say it here, and
    all stop at the iteration of this pause.
    """

    def __init__(self, run: WorkerRun, cadence: Cadence, checkpoints: Checkpoints) -> None:
        self._run, self._cadence, self._checkpoints = run, cadence, checkpoints
        self.evaluation: Evaluation | None = None
        self.last_metrics: dict[str, float] = {}
        self._met_at = (0, 0.0)

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
            UsageError: the evaluation does not return what it should.
        """
        run, cadence, collective = self._run, self._cadence, self._run.context.collective
        if is_done and not run.strategy.traits.lock_step:
            collective.set_deadline(None)  # the others may have many steps to go; engines look whether they take them
        run.awaits_others = True
        reports = collective.all_gather_object(self._report(is_done=is_done))
        run.awaits_others = False
        collective.set_deadline(None)  # an evaluation takes as long as it takes; who dies in it is still noticed
        first = reports[0]
        run.iteration = max(report["iteration"] for report in reports)
        all_done = all(report["done"] for report in reports)
        cadence.evaluates = first["evaluates"]
        evaluates = cadence.is_evaluation_due(run.iteration, at_end=all_done) and not first["interrupted"]
        saves = cadence.is_checkpoint_due(run.iteration, at_end=all_done, is_late=first["is_late"])
        if evaluates or saves or all_done:
            self._look_at_global_model(reports, evaluates=evaluates, saves=saves, is_last=all_done)
        self._agree(reports)
        cadence.plan()
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
            "evaluates": self.evaluation is not None,
            "interrupted": run.reporter.stop_requested(),
            "wants_stop": run.wants_stop(),
            "is_late": self._checkpoints.is_late,
            "iterations_per_s": (run.iteration - iteration) / elapsed_s if elapsed_s > 0 else 0.0,
        }

    def _agree(self, reports: list[dict[str, Any]]) -> None:
        """Whether the run ends here, and when to meet again if steps do not tell who wants to stop."""
        run = self._run
        self._met_at = (run.iteration, run.clock.now_s)
        run.has_ended = run.has_ended or self._cadence.is_over(run.iteration)
        if run.strategy.traits.tells_stop:
            return
        run.has_ended = run.has_ended or any(report["wants_stop"] for report in reports)
        first = reports[0]
        self._cadence.agree_after(run.iteration, time_s=first["time_s"], iterations_per_s=first["iterations_per_s"])

    def _look_at_global_model(
        self, reports: list[dict[str, Any]], *, evaluates: bool, saves: bool, is_last: bool
    ) -> None:
        run = self._run
        time_s = sum(report["time_s"] for report in reports) / len(reports)
        own = self._checkpoints.own_part() if saves else None
        with run.prepared.synchronizer.global_model() as model:
            if evaluates:
                self._evaluate(model, time_s, samples=sum(report["samples"] for report in reports))
            if own is not None:
                self._checkpoints.save(model, own, time_s)
                self._cadence.checkpointed_at = run.iteration
            if is_last and run.context.rank == 0:
                run.reporter.save(MODEL_FILE, snapshot.as_model_file(snapshot.weights_of(model)))

    def _evaluate(self, model: nn.Module, time_s: float, *, samples: int) -> None:
        """Rank 0 calls the script's evaluation; all learn what came of it."""
        found = self._found(model, time_s, samples) if self._run.context.rank == 0 else None
        found = self._run.context.collective.broadcast_object(found)
        if "error" in found:
            raise UsageError(found["error"])
        self.last_metrics = found["metrics"]
        self._cadence.evaluated_at = self._run.iteration
        self._run.has_ended = self._run.has_ended or found["stop"]

    def _found(self, model: nn.Module, time_s: float, samples: int) -> dict[str, Any]:
        run, target = self._run, self._run.config.target
        assert self.evaluation is not None
        try:
            found = evaluate(self.evaluation, model, target=target, now_s=run.context.pacing.now_s)
        except UsageError as error:
            return {"error": str(error)}
        run.reporter.emit(EvaluationRecord(run.iteration, time_s, samples, found.metrics, found.duration_s))
        if target is not None and found.is_target_reached:
            details = {"target": str(target), "value": found.metrics[target.metric]}
            run.tell("target_reached", details, at_s=time_s)
        return {"metrics": found.metrics, "stop": found.is_target_reached}
