"""Pauses: all workers meet between two steps, agree on where the run is, and look at the global model."""

import math
from collections.abc import Mapping
from typing import Any, final

from paceline.errors import UsageError
from paceline.interval import Count
from paceline.strategies.meeting import gathered
from paceline.training import snapshot
from paceline.training.agreement import Agreement
from paceline.training.cadence import Cadence
from paceline.training.checkpoints import Checkpoints
from paceline.training.differing import Differing
from paceline.training.evaluation import Evaluation
from paceline.training.judging import Judge
from paceline.training.kept_models import KeptModels
from paceline.training.row_tables import save_rows
from paceline.training.same_data import SameData
from paceline.training.surviving import Surviving
from paceline.training.worker_run import WorkerRun

MODEL_FILE = "model.safetensors"
_AGREE_S = 1.0
_JUDGE_S = 5.0  # from one pause to the next, where models that are kept may have reached the target,
_LAGS_APART = 10  # and so many times as long as the last worker was waited for


@final
class Pauses:
    """What rank 0 says of evaluation and of the time since the last checkpoint holds for all.

    Where steps do not carry a worker's wish to stop to all others (the trait `tells_stop`), workers say it here, and
    all stop at the iteration of this pause.

    Where workers' models are the servers' (`shows_model`), evaluations bring no pause about: rank 0 keeps models, which
    are judged in pauses that come anyway, as is the global model when one is due just then. They do bring pauses about
    once rank 0 is through with its data. So do they where the best checkpoint is kept, which is of a model as it is
    when all have met.
    """

    def __init__(
        self, run: WorkerRun, cadence: Cadence, checkpoints: Checkpoints, survivor: Surviving | None = None
    ) -> None:
        """`survivor`: knows what all workers have trained on, those who have died among them."""
        self._run, self._cadence, self._checkpoints = run, cadence, checkpoints
        self._survivor = survivor
        self._agreement = Agreement(run)
        self._judge = Judge(run)
        self._kept = KeptModels(run)
        self._same_data: SameData | None = None
        self._has_begun = self._is_last = False
        self._undone: dict[str, Any] | None = None  # what was decided before a meeting that has yet to end
        self._lag_s = 0.0  # by how much this worker goes on later than the first
        self._met_at = (0, 0.0)
        self._together_s = 0.0  # on this worker's clock, where all last began to train together

    @property
    def _judges_beside(self) -> bool:
        """Whether models are judged that rank 0 has kept, so that evaluations bring no pause about."""
        run = self._run
        return run.traits.shows_model and run.context.size > 1 and not self._judge.chooses_best

    @property
    def _keeps(self) -> bool:
        return self._run.context.is_first and self._judges_beside

    @property
    def evaluation(self) -> Evaluation | None:
        """The script's, once it has registered one."""
        return self._judge.evaluation

    @evaluation.setter
    def evaluation(self, evaluation: Evaluation) -> None:
        self._judge.evaluation = evaluation

    @property
    def last_metrics(self) -> dict[str, float]:
        """What the last evaluation returned; empty before the first."""
        return self._judge.last_metrics

    def state(self) -> dict[str, Any]:
        """What has been decided so far, as plain data: the same on all workers in lock step, and under servers."""
        decided = {"cadence": self._cadence.state(), "agreement": self._agreement.state()}
        return {**decided, "together_s": self._together_s, **self._judge.state()}

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Meet from here on when those do who gave this."""
        self._cadence.take_up(state["cadence"])
        self._agreement.take_up(state["agreement"])
        self._together_s = state["together_s"]
        self._judge.take_up(state)

    def note_settings(self) -> None:
        """As `Agreement.note_settings`."""
        self._agreement.note_settings()

    def compare_soon(self) -> None:
        """Have all workers meet after the next update, and compare their models."""
        iteration = self._run.iteration + 1
        self._agreement.look_by(iteration)
        self._cadence.meet_by(iteration)

    def between_steps(self) -> None:
        """The run goes on, and this worker has the model that it computes its next gradient with; where it shows the
        servers' (`shows_model`)."""
        if self._keeps:
            self._kept.keep_if_due()

    def require_evaluation(self) -> None:
        """Raise UsageError if the run asks for evaluations and the script has none."""
        config = self._run.config
        asked = "--target" if config.target is not None else "--keep-best" if config.keep_best is not None else None
        asked = asked or ("--eval-every" if config.eval_every else None)
        if asked is not None and not self._cadence.evaluates:
            raise UsageError(f"{asked} needs an evaluation, and the script registers none: see @worker.evaluation")

    def meet(self, *, is_done: bool, waits_at: str = "") -> bool:
        """Evaluate and save the global model where that is due; `part` comes next. Collective call.

        Args:
            is_done: this worker takes no further step.
            waits_at: the place of its script where this worker waits for all others; empty: it goes on after the pause.

        Returns:
            Whether no worker takes a further step, or all wait at this place.

        Raises:
            UsageError: the evaluation does not return what it should, or a worker under a lock-step strategy has left
                a batch or a step out, or some wait for others that do not come to their place any more.
            TensorMismatch: lock-step workers' parameters or settings have drifted apart.
        """
        run, cadence, collective = self._run, self._cadence, self._run.context.collective
        if self._survivor is not None:
            if self._undone is not None:  # one has died in it, and others may lack what this worker has decided
                self.take_up(self._undone)
            self._undone = self.state()
        if (is_done or waits_at) and not run.traits.lock_step:
            collective.set_deadline(None)  # the others may have many steps to go; engines look whether they take them
        run.awaits_others = True
        reports = gathered(collective, "a pause", self._report(is_done=is_done, waits_at=waits_at))
        run.awaits_others = False
        self._agreement.require(reports)
        if self._survivor is not None and any(report["lacks_script"] for report in reports):
            self._survivor.share_script()
        if self._same_data is not None:
            self._same_data.require([report["data"] for report in reports])
        collective.set_deadline(None)  # an evaluation takes as long as it takes; who dies in it is still noticed
        first = reports[0]
        active = [rank for rank, report in enumerate(reports) if not report["done"]]
        furthest = max(report["iteration"] for report in reports)
        run.iteration = run.prepared.synchronizer.meet(furthest, active=active)
        all_done = all(report["done"] for report in reports)
        cadence.evaluates = first["evaluates"]
        cadence.is_beside = self._judges_beside and not first["done"]
        now = _count(run.iteration, reports)
        is_due = first["is_due"] or cadence.is_evaluation_due(now, at_end=all_done)
        evaluates = is_due and not first["interrupted"]
        saves = cadence.is_checkpoint_due(run.iteration, at_end=all_done, is_late=first["checkpoint_in_s"] <= 0)
        if first["interrupted"]:
            self._kept.drop()
        judges = evaluates or (first["kept"] > 0 and not first["interrupted"])
        if judges or saves or all_done:
            judged = now if evaluates else None
            saves = self._look_at_global_model(reports, judges=judges, judged=judged, saves=saves, is_last=all_done)
        if evaluates:
            cadence.evaluated_at = now
        if cadence.evaluated_at is not None and self._keeps and (evaluates or not self._has_begun):
            self._has_begun = True
            self._kept.begin(cadence.evaluated_at)
        if all_done:
            self._kept.tell()
        lags_s = self._lags_s(reports)
        self._agree(now, reports, has_saved=saves, longest_lag_s=max(lags_s))
        all_wait = _all_wait(reports)
        if all_wait:
            run.has_ended = run.has_ended or any(report["has_ended"] for report in reports)
            self._together_s = run.clock.now_s
        self._is_last, self._lag_s = all_done, lags_s[collective.rank]
        return all_done or all_wait

    def part(self) -> None:
        """The end of what `meet` began: nobody's clock runs before all can go on. Collective call."""
        run, collective = self._run, self._run.context.collective
        if not self._is_last:
            collective.barrier()  # rank 0 may have been busy
            if not run.has_ended:
                run.context.pacing.rest(self._lag_s)
        self._undone = None
        collective.set_deadline(run.config.deadline_s)

    def _report(self, *, is_done: bool, waits_at: str) -> dict[str, Any]:
        """What this worker says of itself."""
        run = self._run
        tally = self._survivor
        samples, steps = (run.samples, run.steps) if tally is None else tally.counts
        iteration, time_s = self._met_at
        elapsed_s = run.clock.now_s - time_s
        if self._same_data is None and run.context.size > 1:
            loaders = {name: feed.loader for name, feed in run.prepared.feeds.items()}
            self._same_data = SameData(loaders)
        return {
            "iteration": run.iteration,
            "done": is_done,
            "waits_at": waits_at,
            "has_ended": run.has_ended,
            "time_s": run.clock.now_s,
            "since_s": run.clock.now_s - self._together_s,
            "samples": samples,
            "steps": steps,
            "lacks_script": tally is not None and tally.lacks_script,
            "evaluates": self.evaluation is not None,
            "kept": len(self._kept),
            "is_due": self._keeps and self._kept.is_due,  # a pause that comes anyway spares the copy
            "interrupted": run.reporter.stop_requested(),
            "wants_stop": run.wants_stop(),
            "checkpoint_in_s": self._checkpoints.due_in_s,
            "iterations_per_s": (run.iteration - iteration) / elapsed_s if elapsed_s > 0 else 0.0,
            "data": {} if self._same_data is None else self._same_data.said(),
            **self._agreement.said(is_last=is_done),
        }

    def _agree(self, now: Count, reports: list[dict[str, Any]], *, has_saved: bool, longest_lag_s: float) -> None:
        """Whether the run ends here, and when to meet next."""
        run, first = self._run, reports[0]
        rate = first["iterations_per_s"]
        self._met_at = (run.iteration, run.clock.now_s)
        run.has_ended = run.has_ended or run.iteration >= self._cadence.end
        waits_s = [self._checkpoints.next_in_s(first["checkpoint_in_s"], has_saved=has_saved)]
        if self._cadence.is_beside and self._judge.ends_run:
            waits_s.append(max(_JUDGE_S, _LAGS_APART * longest_lag_s))
        if not run.traits.tells_stop:
            run.has_ended = run.has_ended or any(report["wants_stop"] for report in reports)
            left_s = (run.config.max_time_s or math.inf) - first["time_s"]
            waits_s += [_AGREE_S, left_s]
        self._cadence.meet_in(min(waits_s), run.iteration, iterations_per_s=rate)
        check_at = self._agreement.next_at(first, iterations_per_s=rate)
        self._cadence.plan(now, check_at=check_at, iterations_per_s=rate)

    def _lags_s(self, reports: list[dict[str, Any]]) -> list[float]:
        """By how many seconds of training each worker came later than the first one that goes on, and goes on later.

        Workers that began their steps together would be less, or more, stale than before. So they go on as if nobody
        had waited, and all their training clocks show the same time, as they have since all last began together: at
        the start, or after a meeting. Those that are through or wait at a place go on at once.
        """
        goes_on = [not (report["done"] or report["waits_at"]) for report in reports]
        if self._run.traits.is_synchronous or not any(goes_on):
            return [0.0] * len(reports)
        first_s = min(report["since_s"] for report, goes in zip(reports, goes_on, strict=True) if goes)
        return [float(report["since_s"] - first_s) * goes for report, goes in zip(reports, goes_on, strict=True)]

    def _look_at_global_model(
        self, reports: list[dict[str, Any]], *, judges: bool, judged: Count | None, saves: bool, is_last: bool
    ) -> bool:
        """
        Args:
            judges: models that were kept are judged, and the global one, if it is told how far the run is (`judged`).
            saves: a checkpoint is due, whatever is found.

        Returns:
            Whether one was taken.
        """
        run = self._run
        time_s = sum(report["time_s"] for report in reports) / len(reports)
        may_save = saves or (judged is not None and self._judge.chooses_best)
        own = self._checkpoints.own_part() if may_save else None
        differing = Differing(run) if judged is not None and run.traits.workers_differ else None
        with run.prepared.global_model() as model:
            if judges:
                self._judge.judge(model, judged, time_s, self._kept)
            if differing is not None:
                differing.record_distance()
            saves = saves or (may_save and self._judge.has_best_here)
            if own is not None and saves:
                self._checkpoints.save(model, own, time_s, metrics=self._judge.score, is_last=is_last)
                self._cadence.checkpointed_at = run.iteration
            if is_last and run.context.is_first:
                run.reporter.save(MODEL_FILE, snapshot.as_model_file(snapshot.weights_of(model)))
                save_rows(run)
        if differing is not None and run.traits.own_scores and self.evaluation is not None:
            differing.record_scores(self.evaluation)
        return saves


def _all_wait(reports: list[dict[str, Any]]) -> bool:
    """Whether all workers wait at one place of the script. Raises UsageError where some wait in vain."""
    places = {rank: report["waits_at"] or "the end" * report["done"] for rank, report in enumerate(reports)}
    waiting = [rank for rank, report in enumerate(reports) if report["waits_at"]]
    if not waiting or not all(places.values()):
        return False
    for rank, place in places.items():
        if place != places[waiting[0]]:
            raise UsageError(
                f"rank {waiting[0]} waits for all at {places[waiting[0]]}, and rank {rank} is at {place}: every worker "
                "must come to the same places in the same order. Where the run's budget ends workers at different "
                "steps, leave what needs all of them out of the middle of epochs"
            )
    return True


def _count(iteration: int, reports: list[dict[str, Any]]) -> Count:
    """How far the run is, by what workers say of themselves; rank 0's clock tells the time."""
    each = {name: sum(report[name] for report in reports) for name in ("samples", "steps")}
    return Count(iteration, each["samples"], each["steps"], reports[0]["time_s"])
