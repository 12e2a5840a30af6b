"""Takes over the steps of a script's optimizers."""

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import torch

from paceline.errors import CallMismatch, PacelineError, UsageError
from paceline.strategies.base import Synchronizer
from paceline.strategies.replica import may_evaluate
from paceline.training import row_tables
from paceline.training.bare_optimizer import bare_step, bare_zero_grad
from paceline.training.cadence import NEVER, Cadence
from paceline.training.course import Course
from paceline.training.sharding import DIFFERS, UnpreparedLoaders
from paceline.training.summed_loss import SummedLoss
from paceline.training.worker_run import WorkerRun

_MOST_LOOKS = 8
_MOST_PASSES = 16
"""How many passes have their first losses looked at: short passes are not to cost more."""
Update = Callable[[], object]
"""The script's own optimizer step."""


@final
class Steps:
    """Has a synchronizer take each step, with the optimizer's own `step` as its update.

    Args:
        summed_loss: looks at losses up to each optimizer's first step, and again in the first step of an epoch and
            after a pause.
        loaders: looks at those that were not prepared.
    """

    def __init__(
        self,
        run: WorkerRun,
        course: Course,
        cadence: Cadence,
        summed_loss: SummedLoss | None,
        loaders: UnpreparedLoaders,
    ) -> None:
        self._run, self._course, self._cadence = run, course, cadence
        self._summed_loss, self._loaders = summed_loss, loaders
        self._synchronizers: list[Synchronizer] = []
        self._yet_to_step: set[Synchronizer] = set()  # their optimizers have not stepped
        self._num_looks = _MOST_LOOKS  # so many steps more, of any optimizer, before it looks no longer
        self._num_passes = 0
        self._is_stepping = False
        self._told: Mapping[str, object] = {}

    @property
    def may_step_unprepared(self) -> bool:
        """Whether an optimizer that was not prepared may step: inside one that was, or after training."""
        return self._is_stepping or self._run.has_ended

    def take_over(self, optimizer: torch.optim.Optimizer, synchronizer: Synchronizer, *, is_first: bool) -> None:
        """Replace the optimizer's step on this object alone, so that schedulers and scalers keep hold of it."""
        own_step, plain_step = optimizer.step, bare_step(optimizer)
        evaluates = may_evaluate(optimizer)
        self._synchronizers.append(synchronizer)
        self._yet_to_step.add(synchronizer)
        begin_step = self._course.begin_step if is_first else self._begin_beside
        take_step = partial(self._step, synchronizer) if is_first else partial(self._step_beside, synchronizer)

        def step(this: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss: list[Any] = [None]
            try:
                if evaluates and closure is not None:
                    evaluate = synchronizer.evaluating(closure)
                    synchronizer.gradients_are_spent = self._run.prepared.handouts.are_gradients_spent
                    take_step(lambda: loss.append(own_step(evaluate)), is_computed=False)
                    synchronizer.gradients_are_spent = False
                    return loss[-1]
                if closure is not None:
                    begin_step()
                    with torch.enable_grad():
                        loss.append(closure())
                take_step(plain_step)
            except CallMismatch as error:
                placed = self._course.placed(error)
                self._course.refuse(placed)
                raise placed from error
            except PacelineError as error:
                self._course.refuse(error)
                raise
            this._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look at
            return loss[-1]

        if hasattr(own_step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler made before counts on it
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        bare_zero_grad(optimizer)

    def tell_facts(self, facts: Mapping[str, object]) -> None:
        """Record what the strategy has measured or chosen, when it is new."""
        if facts:
            self._run.tell("tuned", facts)
        self._told = facts

    def close(self) -> None:
        if self._summed_loss is not None:
            self._summed_loss.close()
            self._summed_loss = None

    def begin_pass(self) -> None:
        """A pass over the data begins."""
        self._num_passes += 1
        if self._num_passes <= _MOST_PASSES:
            self.look_again()

    def look_again(self) -> None:
        """Look again at the losses of the next step; the script may change them in mid-run."""
        if self._summed_loss is not None and not self._summed_loss.is_listening:
            self._summed_loss.begin()
            self._yet_to_step, self._num_looks = set(self._synchronizers), _MOST_LOOKS

    def _look_at_losses(self, summed_loss: SummedLoss, synchronizer: Synchronizer) -> None:
        """Look at losses until each optimizer has stepped once, or others have many times meanwhile."""
        if not summed_loss.has_looked:
            return
        if self._num_looks == _MOST_LOOKS:
            summed_loss.end_step()
        self._num_looks -= 1
        self._yet_to_step.discard(synchronizer)
        if not self._yet_to_step or not self._num_looks:
            summed_loss.close()

    def _step(self, own: Synchronizer, update: Update, *, is_computed: bool = True) -> None:
        """One step of the first optimizer, and its record: what of its time was computing, moving tensors, and waiting
        for others.

        `is_computed`: gradients are there, and `update` computes none.

        Right after a backward pass no code is in the caches: every call that this leaves out saves 2 us a step.
        """
        run = self._run
        prepared, handouts = run.prepared, run.prepared.handouts
        synchronizer = prepared.synchronizer  # of all optimizers
        self._course.begin_step()
        handouts.look_back(is_computed=is_computed)
        if not run.steps:
            self._require_batch()
            row_tables.require_none_since(prepared.replica)
        if self._loaders.passes:
            self._loaders.look(handouts.progress().num_batches)
        if self._summed_loss is not None and self._summed_loss.is_listening:
            self._look_at_losses(self._summed_loss, own)
        alike = prepared.same_gradients
        if alike is not None and alike.is_looking:
            alike.weights.close()
        self._is_stepping = True
        try:
            outcome = synchronizer.step(update, pause_at=self._cadence.next_pause)
        finally:
            self._is_stepping = False
        if synchronizer.facts is not self._told:
            self.tell_facts(synchronizer.facts)
        samples = handouts.end_step()
        if alike is not None and alike.is_looking:
            alike.end_step()
        run.steps += 1
        run.samples += samples
        self._course.end_step(samples, outcome)

    def _require_batch(self) -> None:
        """Raises UsageError before the first step if the script has taken no batch: what it reads is not divided."""
        run = self._run
        feeds = run.prepared.feeds.values()
        if run.context.size == 1 or any(feed.handouts.num_out or feed.handouts.has_trained for feed in feeds):
            return
        if all(getattr(feed.loader.dataset, DIFFERS, False) for feed in feeds):
            return
        raise UsageError(
            f"rank {run.context.rank}: the optimizer steps, and the script has taken no batch of the loader that "
            "prepare returned; every worker would train on all samples of one that was not prepared. Loop over the "
            "prepared one: model, optimizer, loader = worker.prepare(model, optimizer, loader). If each worker is to "
            f"make data of its own, set loader.dataset.{DIFFERS} = True; and leave out a step that comes before the "
            "first batch, where there is no gradient yet"
        )

    def _step_beside(self, synchronizer: Synchronizer, update: Update, *, is_computed: bool = True) -> None:
        """One step of another optimizer. It belongs to the first one's step before it in its round of the script's
        loop, or to the next one; so also to the last, after which the run has ended already."""
        self._begin_beside()
        if self._summed_loss is not None and self._summed_loss.is_listening:
            self._look_at_losses(self._summed_loss, synchronizer)
        alike = self._run.prepared.same_gradients
        if alike is not None and alike.is_looking:
            alike.weights.close()
        self._is_stepping = True
        try:
            synchronizer.step(update, pause_at=NEVER)
        finally:
            self._is_stepping = False

    def _begin_beside(self) -> None:
        self._course.require_allowed()
        self._course.start_once()
