"""One worker's run: the script's steps, pauses in which all workers meet, and when to end."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.config import RunConfig
from paceline.errors import BudgetReached, UsageError
from paceline.records import EvaluationRecord, EventRecord, MetricRecord, Reporter, StepRecord
from paceline.seeding import derive, seed_everything
from paceline.strategies.base import Context, Replica, StepOutcome, Strategy, Synchronizer
from paceline.strategies.replica import describe, require_same_tensors
from paceline.training import snapshot
from paceline.training.accounting import Account
from paceline.training.cadence import Cadence
from paceline.training.clock import TrainingClock
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.sharding import RankBatch, ShardedLoader
from paceline.training.snapshot import Snapshot

MODEL_FILE = "model.safetensors"
CHECKPOINT_INTERVAL_S = 30.0


@final
class Session:
    """Joins a script's model, optimizer and loader to a strategy.

    A pause lies between two steps of the script: when it asks for its next batch, or steps again without one. What a
    script does after `optimizer.step()`, such as stepping a scheduler, so belongs to the step before the pause.

    Args:
        context: this worker's place in the world.
        strategy: what is exchanged.
        config: budget and cadence.
        reporter: where records and files go.
        checkpoint: to go on from, if any.
    """

    def __init__(
        self,
        context: Context,
        strategy: Strategy,
        config: RunConfig,
        reporter: Reporter,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.context, self.strategy, self.config, self.reporter = context, strategy, config, reporter
        self.clock = TrainingClock(time_s=context.pacing.now_s)
        self.iteration = 0
        self.steps = 0
        self.samples = 0
        self.has_ended = False
        self.last_metrics: dict[str, float] = {}
        self._checkpoint = checkpoint
        self._evaluation: Evaluation | None = None
        self._cadence = Cadence(config)
        self._prepared: _Prepared | None = None
        self._has_started = False
        self._has_finished = False
        self._batch_samples = 0
        self._unsettled: StepOutcome | None = None
        self._last: Snapshot | None = None
        self._is_through = False  # whether this worker reached the end of its data, rather than of a budget
        self._checkpointed_s = self.context.pacing.now_s()
        seed_everything(config.seed)

    # --- what a script asks for -------------------------------------------------------------------------------

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], extra: dict[str, Any]
    ) -> ShardedLoader:
        """Move the model to the device, agree on it among ranks, and take over the optimizer's step and the data."""
        if self._prepared is not None:
            raise UsageError("prepare was called twice; prepare one model, optimizer and loader a run")
        for name, thing in extra.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise UsageError(f"prepare({name}=...) takes things with state_dict and load_state_dict")
        _move(model, optimizer, self.context.device)
        replica = describe(model, optimizer)
        collective, config = self.context.collective, self.config
        if collective.size > 1:
            require_same_tensors(replica, collective)
        if self._checkpoint is not None:
            snapshot.load_model(model, self._checkpoint, num_workers=collective.size, seed=config.seed)
        if collective.size > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                collective.broadcast(tensor.data)
        sharded = ShardedLoader(
            loader,
            rank=self.context.rank,
            size=self.context.size,
            seed=config.seed,
            on_return=self._settle,
            on_batch=self._on_batch,
            on_position=self._on_position,
            should_stop=lambda: self.has_ended,
        )
        self.context.pacing.watch(replica)
        synchronizer = self.strategy.bind(self.context, replica)
        synchronizer.stop_vote = self._wants_stop
        if synchronizer.facts and self.context.rank == 0:
            self.reporter.emit(EventRecord("tuned", "run", self.iteration, self.clock.now_s, dict(synchronizer.facts)))
        account = Account(self.clock, synchronizer.timings)
        self._prepared = _Prepared(replica, synchronizer, sharded, account, extra)
        self._take_over(optimizer)
        if self._checkpoint is not None:
            self._restore(self._checkpoint)
        seed_everything(derive(config.seed, "rank", self.context.rank))
        return sharded

    def set_evaluation(self, evaluation: Evaluation) -> None:
        if self._evaluation is not None:
            raise UsageError("a second evaluation was registered; return all metrics from one function")
        if self._has_started:
            raise UsageError("the evaluation came after the first batch; register it before the training loop")
        self._evaluation = evaluation

    def log(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Keep what the script says of this step."""
        now_s = self.clock.now_s
        for name, value in metrics.items():
            number = float(value.detach()) if isinstance(value, Tensor) else float(value)
            self.reporter.emit(MetricRecord(self.context.rank, self.steps, self.iteration, now_s, name, number))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate."""
        synchronizer = self._require_prepared().synchronizer
        before = synchronizer.set_synchronizing(False)
        try:
            yield
        finally:
            synchronizer.set_synchronizing(before)

    def finish(self) -> None:
        """The script is done: wait for the others, evaluate and save. Collective call."""
        if self._has_finished or self._prepared is None:
            return
        self._has_finished = True
        self._ensure_started()
        self.clock.pause()
        self._is_through = not self.has_ended
        self._end()
        self._prepared.synchronizer.leave()
        while not self._meet(is_done=True):
            pass
        self._prepared.synchronizer.close()

    # --- steps ------------------------------------------------------------------------------------------------

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's step on this object alone, so that schedulers and scalers keep hold of it."""
        own_step = optimizer.step

        def step(this: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if isinstance(this, torch.optim.LBFGS):
                return self._step(lambda: own_step(closure))
            loss: Any = None
            if closure is not None:
                self._begin_step()
                with torch.enable_grad():
                    loss = closure()
            self._step(own_step)
            this._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look at
            return loss

        if hasattr(own_step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler made before counts on it
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _step(self, update: Callable[[], object]) -> Any:
        """One step, and its record: what of its time was computing, moving tensors, and waiting for others."""
        prepared = self._require_prepared()
        self._begin_step()
        returned: list[object] = []
        outcome = prepared.synchronizer.step(lambda: returned.append(update()), pause_at=self._cadence.next_pause())
        samples, self._batch_samples = self._batch_samples, 0
        self.steps += 1
        self.samples += samples
        share = prepared.account.close_step()
        self.reporter.emit(
            StepRecord(
                worker=self.context.rank,
                step=self.steps,
                iteration=outcome.iteration,
                time_s=share.time_s,
                samples=samples,
                compute_s=share.compute_s,
                communication_s=share.communication_s,
                waiting_s=share.waiting_s,
                moved_bytes=share.moved_bytes,
                staleness=outcome.staleness,
                hidden_s=share.hidden_s,
            )
        )
        self._take(outcome)
        self._unsettled = outcome
        return returned[0] if returned else None

    def _begin_step(self) -> None:
        self._ensure_started()
        self._settle()
        if self.has_ended:
            raise BudgetReached("the run has ended; loop over the prepared loader, which ends with it")

    def _take(self, outcome: StepOutcome) -> None:
        self.iteration = outcome.iteration
        if outcome.stop or self._cadence.is_over(outcome.iteration):
            self.has_ended = True

    def _settle(self) -> None:
        """Between two steps: pause where that is due, and wait for admission where a pause was entered without it."""
        outcome, self._unsettled = self._unsettled, None
        while outcome is not None and not self.has_ended:
            if outcome.iteration >= self._cadence.next_pause():
                with self._require_prepared().account.pause():
                    self._meet(is_done=False)
            if self.has_ended or outcome.admitted:
                break
            pause_at = self._cadence.next_pause()
            outcome = self._require_prepared().synchronizer.wait_for_admission(pause_at=pause_at)
            self._take(outcome)
        if self.has_ended:
            self._end()

    def _end(self) -> None:
        """Nothing that the script does from here on is training: keep what a checkpoint is to say of it."""
        self.has_ended = True
        if self._last is None:
            self._last = copy.deepcopy(self._snapshot())

    def _on_batch(self, batch: RankBatch) -> None:
        self._ensure_started()
        self._batch_samples += len(batch.indices)
        self._require_prepared().synchronizer.set_weight(batch.weight)

    def _wants_stop(self) -> bool:
        is_over = self.config.max_time_s is not None and self.clock.now_s >= self.config.max_time_s
        return is_over or self.reporter.stop_requested()

    # --- pauses -----------------------------------------------------------------------------------------------

    def _ensure_started(self) -> None:
        """All workers are ready: look at the model once, and start the clock."""
        if self._has_started:
            return
        self._has_started = True
        self._meet(is_done=False)
        self._require_evaluation()
        if self.context.rank == 0:
            self.reporter.emit(EventRecord("training", "run", self.iteration, self.clock.now_s, {}))
        self._require_prepared().account.start()

    def _require_evaluation(self) -> None:
        """Raise UsageError if the run asks for evaluations and the script has none."""
        asked = "--target" if self.config.target is not None else "--eval-every" if self.config.eval_every else None
        if asked is not None and not self._cadence.evaluates:
            raise UsageError(f"{asked} needs an evaluation, and the script registers none: see @worker.evaluation")

    def require_same_step(self, what: str) -> None:
        """Raise UsageError for what needs all workers, where they are not at the same step."""
        if self._has_started and not self._has_finished and not self.strategy.is_lock_step():
            raise UsageError(
                f"{what} in the training loop needs all workers at the same step, which this strategy does not keep; "
                "call it before the first batch"
            )

    def _meet(self, *, is_done: bool) -> bool:
        """All workers meet: the global model is evaluated and saved where that is due. Returns whether all are done.

        What rank 0 says of evaluation, of stopping and of the time since the last checkpoint holds for all.

        Raises:
            UsageError: the evaluation does not return what it should.
        """
        collective = self.context.collective
        if is_done and not self.strategy.is_lock_step():
            collective.set_deadline(None)  # the others may have many steps to go
        reports = collective.all_gather_object(
            {
                "iteration": self.iteration,
                "done": is_done,
                "time_s": self.clock.now_s,
                "samples": self.samples,
                "through": self._is_through,
                "evaluates": self._evaluation is not None,
                "stop": self.reporter.stop_requested(),
                "is_late": self.context.pacing.now_s() - self._checkpointed_s > CHECKPOINT_INTERVAL_S,
            }
        )
        collective.set_deadline(None)  # an evaluation takes as long as it takes; who dies in it is still noticed
        self.iteration = max(report["iteration"] for report in reports)
        all_done = all(report["done"] for report in reports)
        cadence = self._cadence
        cadence.evaluates = reports[0]["evaluates"]
        evaluates = cadence.is_evaluation_due(self.iteration, at_end=all_done) and not reports[0]["stop"]
        saves = cadence.is_checkpoint_due(self.iteration, at_end=all_done, is_late=reports[0]["is_late"])
        if evaluates or saves or all_done:
            time_s = sum(report["time_s"] for report in reports) / len(reports)
            own = (self._last or self._snapshot()) if saves else None
            with self._global_model() as model:
                if evaluates:
                    self._evaluate(model, time_s, samples=sum(report["samples"] for report in reports))
                if own is not None:
                    self._save(model, own, time_s, is_through=any(report["through"] for report in reports))
                if all_done and self.context.rank == 0:
                    self.reporter.save(MODEL_FILE, snapshot.as_model_file(snapshot.weights_of(model)))
        self.has_ended = self.has_ended or cadence.is_over(self.iteration)
        if not all_done:
            collective.barrier()  # rank 0 may have been busy; nobody's clock runs before all can go on
        collective.set_deadline(self.config.deadline_s)
        return all_done

    @contextmanager
    def _global_model(self) -> Iterator[nn.Module]:
        """Rank 0's model with the global parameters, and with the mean over workers of its floating-point buffers."""
        prepared = self._require_prepared()
        model = prepared.replica.model
        if self.context.rank == 0:
            prepared.synchronizer.refresh()
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        own = [buffer.detach().clone() for buffer in buffers]
        if self.context.size > 1:
            for buffer in buffers:
                self.context.collective.all_reduce(buffer, op="mean").wait()
        try:
            yield model
        finally:
            with torch.no_grad():
                for buffer, before in zip(buffers, own, strict=True):
                    buffer.copy_(before)

    def _evaluate(self, model: nn.Module, time_s: float, *, samples: int) -> None:
        """Rank 0 calls the script's evaluation; all learn what came of it."""
        verdict = None
        if self.context.rank == 0:
            verdict = self._look_at(model, time_s, samples)
            self._require_prepared().synchronizer.refresh()  # an evaluation may have swapped weights, as of an average
        verdict = self.context.collective.broadcast_object(verdict)
        if "error" in verdict:
            raise UsageError(verdict["error"])
        self.last_metrics = verdict["metrics"]
        self._cadence.evaluated_at = self.iteration
        self.has_ended = self.has_ended or verdict["stop"]

    def _look_at(self, model: nn.Module, time_s: float, samples: int) -> dict[str, Any]:
        assert self._evaluation is not None
        target = self.config.target
        try:
            found = evaluate(self._evaluation, model, target=target, now_s=self.context.pacing.now_s)
        except UsageError as error:
            return {"error": str(error)}
        self.reporter.emit(EvaluationRecord(self.iteration, time_s, samples, found.metrics, found.duration_s))
        if target is not None and found.is_target_reached:
            details = {"target": str(target), "value": found.metrics[target.metric]}
            self.reporter.emit(EventRecord("target_reached", "run", self.iteration, time_s, details))
        return {"metrics": found.metrics, "stop": found.is_target_reached}

    # --- checkpoints ------------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        prepared = self._require_prepared()
        return snapshot.take(prepared.replica, prepared.loader, prepared.extra, steps=self.steps, samples=self.samples)

    def _save(self, model: nn.Module, own: Snapshot, time_s: float, *, is_through: bool) -> None:
        """Write the checkpoint. Collective call."""
        workers = snapshot.gather_workers(self.context.collective, own)
        if self.context.rank == 0:
            if is_through and self.strategy.is_synchronous():
                workers = snapshot.at_the_end(workers)
            checkpoint = Checkpoint(
                iteration=self.iteration,
                time_s=time_s,
                model=snapshot.weights_of(model),
                optimizer=self._require_prepared().synchronizer.optimizer_state(),
                groups=own.groups,
                workers=workers,
                seed=self.config.seed,
                extra=own.extra,
            )
            self.reporter.save(FILE_NAME, checkpoint.encode())
            self.reporter.emit(EventRecord("checkpoint", "run", self.iteration, time_s, {"file": FILE_NAME}))
        self._cadence.checkpointed_at = self.iteration
        self._checkpointed_s = self.context.pacing.now_s()

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Set the counters, the optimizer's state, this worker's buffers and the position in the data."""
        prepared = self._require_prepared()
        mine = checkpoint.workers[self.context.rank]
        self.iteration, self.steps, self.samples = checkpoint.iteration, mine.steps, mine.samples
        self._cadence.evaluated_at = self._cadence.checkpointed_at = checkpoint.iteration
        self.clock.set(checkpoint.time_s)
        snapshot.load_buffers(prepared.replica.model, mine)
        prepared.synchronizer.restore(checkpoint.optimizer, iteration=checkpoint.iteration)
        prepared.loader.resume_at(mine.epoch, mine.num_batches_done)

    def _on_position(self) -> None:
        assert self._checkpoint is not None
        prepared = self._require_prepared()
        snapshot.resume_script(self._checkpoint, self.context.rank, prepared.replica, prepared.extra)

    def _require_prepared(self) -> _Prepared:
        if self._prepared is None:
            raise UsageError("call worker.prepare(model, optimizer, loader) first")
        return self._prepared


@final
class _Prepared:
    """What `prepare` was given, joined to the strategy."""

    def __init__(
        self,
        replica: Replica,
        synchronizer: Synchronizer,
        loader: ShardedLoader,
        account: Account,
        extra: dict[str, Any],
    ) -> None:
        self.replica, self.synchronizer, self.loader = replica, synchronizer, loader
        self.account, self.extra = account, extra


def _move(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Bring the model to the worker's device in place, so that the optimizer keeps its parameters, and its state."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                state[name] = value.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
