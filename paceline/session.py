"""One worker's run: steps and their accounting, pauses for evaluation and checkpoints, and when to end."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, final

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.checkpoint import FILE_NAME, Checkpoint, WorkerState
from paceline.clock import TrainingClock
from paceline.config import RunConfig
from paceline.errors import BudgetReached, TensorMismatch, UsageError, unknown
from paceline.records import EvaluationRecord, EventRecord, MetricRecord, Reporter, StepRecord
from paceline.seeding import derive, preserved_random_state, random_state, seed_everything, set_random_state
from paceline.sharding import RankBatch, ShardedLoader
from paceline.strategies.base import Context, Replica, StepOutcome, Strategy, Synchronizer
from paceline.strategies.replica import describe

MODEL_FILE = "model.safetensors"
CHECKPOINT_INTERVAL_S = 30.0
_NEVER = 2**62

Evaluation = Callable[[nn.Module], Mapping[str, float]]


@dataclass
class _Totals:
    """Readings at the end of the last step, to tell the next one's share."""

    time_s: float = 0.0
    communication_s: float = 0.0
    waiting_s: float = 0.0
    moved_bytes: int = 0


@final
class Session:
    """Joins a script's model, optimizer and loader to a strategy.

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
        self.clock = TrainingClock()
        self.iteration = 0
        self.steps = 0
        self.samples = 0
        self.has_ended = False
        self.last_metrics: dict[str, float] = {}
        self._checkpoint = checkpoint
        self._evaluation: Evaluation | None = None
        self._replica: Replica | None = None
        self._synchronizer: Synchronizer | None = None
        self._loader: ShardedLoader | None = None
        self._extra: dict[str, Any] = {}
        self._has_started = False
        self._has_finished = False
        self._batch_samples = 0
        self._totals = _Totals()
        self._evaluated_at = -1
        self._checkpointed_at = -1
        self._checkpointed_s = time.monotonic()
        seed_everything(config.seed)

    # --- what a script asks for -------------------------------------------------------------------------------

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], extra: dict[str, Any]
    ) -> ShardedLoader:
        """Move the model to the device, agree on it among ranks, and take over the optimizer's step and the data."""
        if self._synchronizer is not None:
            raise UsageError("prepare was called twice; prepare one model, optimizer and loader a run")
        for name, thing in extra.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise UsageError(f"prepare({name}=...) takes things with state_dict and load_state_dict")
        _move(model, optimizer, self.context.device)
        replica = describe(model, optimizer)
        collective = self.context.collective
        if collective.size > 1:
            self._require_same_tensors(replica)
        self._load_model(model)
        for tensor in [*model.parameters(), *model.buffers()]:
            if collective.size > 1:
                collective.broadcast(tensor.data)
        self._loader = ShardedLoader(
            loader,
            rank=self.context.rank,
            size=self.context.size,
            seed=self.config.seed,
            on_batch=self._on_batch,
            on_position=self._on_position,
            should_stop=lambda: self.has_ended,
        )
        self._replica, self._extra = replica, extra
        self._synchronizer = self.strategy.bind(self.context, replica)
        self._synchronizer.stop_vote = self._wants_stop
        self._take_over(optimizer)
        self._restore()
        seed_everything(derive(self.config.seed, "rank", self.context.rank))
        return self._loader

    def set_evaluation(self, evaluation: Evaluation) -> None:
        if self._evaluation is not None:
            raise UsageError("a second evaluation was registered; return all metrics from one function")
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
        synchronizer = self._prepared()[1]
        before = synchronizer.set_synchronizing(False)
        try:
            yield
        finally:
            synchronizer.set_synchronizing(before)

    def finish(self) -> None:
        """The script is done: wait for the others, evaluate and save. Collective call."""
        if self._has_finished or self._synchronizer is None:
            return
        self._has_finished = True
        self._ensure_started()
        self.clock.pause()
        self.has_ended = True
        self._synchronizer.leave()
        while not self._meet(is_done=True):
            pass
        self._synchronizer.close()

    # --- steps ------------------------------------------------------------------------------------------------

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's step on this object alone, so that schedulers and scalers keep hold of it."""
        own_step = optimizer.step

        def step(this: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if isinstance(this, torch.optim.LBFGS):
                return self._step(lambda: own_step(closure))  # type: ignore[arg-type]
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step(own_step)
            this._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look at
            return loss

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _step(self, update: Callable[[], object]) -> Any:
        if self.has_ended:
            raise BudgetReached("the run has ended; loop over the prepared loader, which ends with it")
        self._ensure_started()
        synchronizer = self._prepared()[1]
        returned: list[object] = []
        outcome = synchronizer.step(lambda: returned.append(update()), pause_at=self._pause_at())
        self.steps += 1
        self.samples += self._batch_samples
        self.iteration = outcome.iteration
        self._account(outcome)
        self._batch_samples = 0
        self._after(outcome)
        return returned[0] if returned else None

    def _account(self, outcome: StepOutcome) -> None:
        """Emit the step's record: what of its time was computing, moving tensors, and waiting for others."""
        timings = self._prepared()[1].timings
        now = _Totals(
            self.clock.now_s,
            sum(timing.communication_s for timing in timings),
            sum(timing.waiting_s for timing in timings),
            sum(timing.moved_bytes for timing in timings),
        )
        before, self._totals = self._totals, now
        communication_s = now.communication_s - before.communication_s
        waiting_s = now.waiting_s - before.waiting_s
        self.reporter.emit(
            StepRecord(
                self.context.rank,
                self.steps,
                outcome.iteration,
                now.time_s,
                self._batch_samples,
                max(0.0, now.time_s - before.time_s - communication_s - waiting_s),
                communication_s,
                waiting_s,
                now.moved_bytes - before.moved_bytes,
                outcome.staleness,
            )
        )

    def _after(self, outcome: StepOutcome) -> None:
        """Pause where one is due, and wait for admission where the pause was entered without it."""
        while True:
            if outcome.stop or self.iteration >= (self.config.max_steps or _NEVER):
                self.has_ended = True
            elif outcome.iteration >= self._pause_at():
                self.clock.pause()
                self._meet(is_done=False)
                self._resume_clock()
            if self.has_ended or outcome.admitted:
                return
            outcome = self._prepared()[1].wait_for_admission(pause_at=self._pause_at())
            self.iteration = outcome.iteration

    def _on_batch(self, batch: RankBatch) -> None:
        self._ensure_started()
        self._batch_samples += len(batch.indices)
        self._prepared()[1].weight = batch.weight

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
        if self.context.rank == 0:
            self.reporter.emit(EventRecord("training", "run", self.iteration, self.clock.now_s, {}))
        self._resume_clock()

    def _resume_clock(self) -> None:
        """The others' clocks start within the same barrier; what a pause moved is not a step's."""
        self.context.collective.barrier()
        timings = self._prepared()[1].timings
        self._totals = _Totals(
            self.clock.now_s,
            sum(timing.communication_s for timing in timings),
            sum(timing.waiting_s for timing in timings),
            sum(timing.moved_bytes for timing in timings),
        )
        self.clock.resume()

    def _pause_at(self) -> int:
        """The iteration at which all workers are to meet next."""
        config = self.config
        due = [config.max_steps or _NEVER]
        if config.eval_every is not None and self._evaluation is not None:
            due.append((max(0, self._evaluated_at) // config.eval_every + 1) * config.eval_every)
        if config.checkpoint_every is not None:
            due.append((max(0, self._checkpointed_at) // config.checkpoint_every + 1) * config.checkpoint_every)
        return min(due)

    def _meet(self, *, is_done: bool) -> bool:
        """All workers meet: the global model is evaluated and saved where that is due. Returns whether all are done.

        Raises:
            UsageError: the target's metric is not among those that the evaluation returns.
        """
        collective, config = self.context.collective, self.config
        report = {"iteration": self.iteration, "done": is_done, "time_s": self.clock.now_s, "samples": self.samples}
        reports = collective.all_gather_object(report)
        iteration = max(report["iteration"] for report in reports)
        all_done = all(report["done"] for report in reports)
        time_s = sum(report["time_s"] for report in reports) / len(reports)
        samples = sum(report["samples"] for report in reports)

        is_stopping = bool(collective.broadcast_object(self.reporter.stop_requested()))
        evaluates = self._is_evaluation_due(iteration, all_done=all_done) and not is_stopping
        saves = collective.broadcast_object(self._is_checkpoint_due(iteration, all_done=all_done))
        verdict: dict[str, Any] = {"stop": False, "error": None}
        if evaluates or saves:
            with self._global_model() as model:
                if evaluates:
                    verdict = collective.broadcast_object(
                        self._evaluate(model, iteration, time_s, samples) if self.context.rank == 0 else None
                    )
                    self._evaluated_at = iteration
                    if verdict["error"] is not None:
                        raise UsageError(verdict["error"])
                    self.last_metrics = verdict["metrics"]
                if saves:
                    self._save(model, iteration, time_s, is_final=all_done)
                    self._checkpointed_at = iteration
        self.iteration = iteration
        if verdict["stop"] or iteration >= (config.max_steps or _NEVER):
            self.has_ended = True
        return all_done

    def _is_evaluation_due(self, iteration: int, *, all_done: bool) -> bool:
        if self._evaluation is None or iteration == self._evaluated_at:
            return False
        if all_done:
            return True
        every = self.config.eval_every
        if every is None:
            return False
        return self._evaluated_at < 0 or iteration // every > self._evaluated_at // every

    def _is_checkpoint_due(self, iteration: int, *, all_done: bool) -> bool:
        """Asked on rank 0, which decides for all."""
        if iteration == self._checkpointed_at or (iteration == 0 and not all_done):
            return False
        every = self.config.checkpoint_every
        if all_done or (every is not None and iteration // every > max(0, self._checkpointed_at) // every):
            return True
        return every is None and time.monotonic() - self._checkpointed_s > CHECKPOINT_INTERVAL_S

    @contextmanager
    def _global_model(self) -> Iterator[nn.Module]:
        """Rank 0's model with the global parameters, and with the mean over workers of its floating-point buffers."""
        replica, synchronizer = self._prepared()
        if self.context.rank == 0:
            synchronizer.refresh()
        buffers = [buffer for buffer in replica.model.buffers() if buffer.is_floating_point()]
        own = [buffer.detach().clone() for buffer in buffers]
        if self.context.size > 1:
            for buffer in buffers:
                self.context.collective.all_reduce(buffer, op="mean").wait()
        try:
            yield replica.model
        finally:
            with torch.no_grad():
                for buffer, before in zip(buffers, own, strict=True):
                    buffer.copy_(before)

    def _evaluate(self, model: nn.Module, iteration: int, time_s: float, samples: int) -> dict[str, Any]:
        """Call the script's evaluation; what all ranks are to know of it."""
        assert self._evaluation is not None
        began_s = time.perf_counter()
        modes = {module: module.training for module in model.modules()}
        model.eval()
        with preserved_random_state(), torch.no_grad():
            returned = self._evaluation(model)
        for module, mode in modes.items():
            module.training = mode
        if not isinstance(returned, Mapping):
            return {"error": f"the evaluation returned {type(returned).__name__}; it must return a dict of numbers"}
        metrics = {str(name): float(value) for name, value in returned.items()}
        target = self.config.target
        if target is not None and target.metric not in metrics:
            return {"error": str(unknown("target metric", target.metric, metrics))}
        duration_s = time.perf_counter() - began_s
        self.reporter.emit(EvaluationRecord(iteration, time_s, samples, metrics, duration_s))
        is_reached = target is not None and target.is_reached(metrics[target.metric])
        if is_reached:
            details = {"target": str(target), "value": metrics[target.metric]}  # type: ignore[union-attr]
            self.reporter.emit(EventRecord("target_reached", "run", iteration, time_s, details))
        return {"stop": is_reached, "error": None, "metrics": metrics}

    # --- checkpoints ------------------------------------------------------------------------------------------

    def _save(self, model: nn.Module, iteration: int, time_s: float, *, is_final: bool) -> None:
        """Write the checkpoint, and at the end the model. Collective call."""
        replica, synchronizer = self._prepared()
        assert self._loader is not None
        mine = WorkerState(
            self.steps, self.samples, self._loader.epoch, self._loader.num_batches_done, random_state()
        )
        states = self.context.collective.all_gather_object(vars(mine))
        if self.context.rank != 0:
            return
        # Clones: parameters are views of one flat buffer, and tied weights share memory, which safetensors refuses.
        weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        checkpoint = Checkpoint(
            iteration=iteration,
            time_s=time_s,
            model=weights,
            optimizer=synchronizer.optimizer_state(),
            groups=[dict(group) for group in describe(replica.model, replica.optimizer).optimizer_spec.groups],
            workers=[WorkerState(**state) for state in states],
            seed=self.config.seed,
            extra={name: thing.state_dict() for name, thing in self._extra.items()},
        )
        self.reporter.save(FILE_NAME, checkpoint.encode())
        self._checkpointed_s = time.monotonic()
        self.reporter.emit(EventRecord("checkpoint", "run", iteration, time_s, {"file": FILE_NAME}))
        if is_final:
            content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.items()})
            self.reporter.save(MODEL_FILE, content)

    def _load_model(self, model: nn.Module) -> None:
        if self._checkpoint is None:
            return
        if len(self._checkpoint.workers) != self.context.size:
            raise UsageError(
                f"the checkpoint was taken with {len(self._checkpoint.workers)} workers, this run has "
                f"{self.context.size}; resume with as many"
            )
        if self._checkpoint.seed != self.config.seed:
            raise UsageError(f"the checkpoint was taken with --seed {self._checkpoint.seed}; resume with the same")
        try:
            model.load_state_dict(self._checkpoint.model)
        except RuntimeError as error:
            raise UsageError(f"the checkpoint is of another model: {error}") from None

    def _restore(self) -> None:
        """Set the counters, the optimizer's state and the position in the data."""
        checkpoint = self._checkpoint
        if checkpoint is None:
            return
        assert self._loader is not None
        mine = checkpoint.workers[self.context.rank]
        self.iteration, self.steps, self.samples = checkpoint.iteration, mine.steps, mine.samples
        self._evaluated_at = self._checkpointed_at = checkpoint.iteration
        self.clock.set(checkpoint.time_s)
        self._prepared()[1].restore(checkpoint.optimizer, iteration=checkpoint.iteration)
        self._loader.resume_at(mine.epoch, mine.num_batches_done)

    def _on_position(self) -> None:
        """The script has come to where the checkpoint was taken: everything that it moved since goes back there."""
        assert self._checkpoint is not None
        replica = self._prepared()[0]
        for group, saved in zip(replica.optimizer.param_groups, self._checkpoint.groups, strict=True):
            group.update(saved)
        for name, thing in self._extra.items():
            if name not in self._checkpoint.extra:
                raise UsageError(f"the checkpoint has no state for prepare({name}=...)")
            thing.load_state_dict(self._checkpoint.extra[name])
        set_random_state(self._checkpoint.workers[self.context.rank].random_state)

    # --- helpers ----------------------------------------------------------------------------------------------

    def _prepared(self) -> tuple[Replica, Synchronizer]:
        if self._replica is None or self._synchronizer is None:
            raise UsageError("call worker.prepare(model, optimizer, loader) first")
        return self._replica, self._synchronizer

    def _require_same_tensors(self, replica: Replica) -> None:
        """Raise on every rank if one has another model.

        Raises:
            TensorMismatch: naming the rank and the tensor.
        """
        mine = [f"{spec.name} of shape {list(spec.shape)} and {spec.dtype}" for spec in replica.specs]
        everyone = self.context.collective.all_gather_object(mine)
        for rank, theirs in enumerate(everyone):
            for index, (first, other) in enumerate(zip_longest(everyone[0], theirs, fillvalue="nothing")):
                if first != other:
                    raise TensorMismatch(f"parameter {index} differs: rank 0 has {first}, rank {rank} has {other}")


def _move(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Bring the model to the worker's device in place, so that the optimizer keeps its parameters."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
