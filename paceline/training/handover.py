"""What a framework that has a training loop and checkpoints of its own takes of a run, and gives back to it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from paceline.checkpoint import Checkpoint
from paceline.errors import UsageError
from paceline.strategies.replica import named_parameters_of
from paceline.training import snapshot
from paceline.training.checkpoints import Checkpoints
from paceline.training.course import Course
from paceline.training.snapshot import Snapshot
from paceline.training.worker_run import WorkerRun


@final
class Handover:
    """
    Args:
        go_on: takes up a checkpoint before the first step.
    """

    def __init__(
        self, run: WorkerRun, course: Course, checkpoints: Checkpoints, *, go_on: Callable[[Checkpoint], None]
    ) -> None:
        self._run, self._course, self._checkpoints, self._go_on = run, course, checkpoints, go_on
        self._own: Snapshot | None = None  # this worker's part, from before the global model was in place

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """The model that is evaluated and saved, in place on every worker until the end. Collective call."""
        prepared = self._run.prepared
        if self._own is not None:
            yield prepared.replica.model
            return
        with self._course.meeting("the global model"):
            self._own = self._checkpoints.own_part()
            self._course.has_global_model = True
            try:
                with prepared.global_model() as model, self._as_on_the_first(model):
                    yield model
            finally:
                self._own, self._course.has_global_model = None, False

    @contextmanager
    def _as_on_the_first(self, model: nn.Module) -> Iterator[None]:
        """Servers have given it to the first worker alone, which has its own again afterwards; others have what their
        last answer held, and so have they."""
        traits = self._run.traits
        if (traits.lock_step and not traits.servers_own_model) or self._run.context.size == 1:
            yield
            return
        tensors = [*(parameter.data for _, parameter in named_parameters_of(model)), *model.buffers()]
        own = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            self._run.context.collective.broadcast(tensor)
        try:
            yield
        finally:
            for tensor, before in zip(tensors, own, strict=True):
                tensor.copy_(before)

    def state(self) -> bytes:
        """All that a checkpoint holds beside the model's weights, on the first worker; empty elsewhere. Collective call
        while the global model is in place."""
        assert self._own is not None
        run = self._run
        workers = snapshot.gather_workers(run.context.collective, self._own)
        if not run.context.is_first:
            return b""
        return self._checkpoints.made({}, self._own, workers, run.clock.now_s).encode()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """As `optimizer.state_dict()`; on the first worker also where servers hold the state. Call it while the global
        model is in place."""
        saved, prepared = optimizer.state_dict(), self._run.prepared
        if not self._run.traits.servers_own_model or not self._run.context.is_first:
            return saved
        name = next(name for name, own in prepared.optimizers.items() if own is optimizer)
        prefix = f"{name}." if prepared.optimizer_names else ""
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = set(map(id, prepared.replica.parameters))  # also those that are frozen by now
        trained = [number for number, parameter in enumerate(every) if id(parameter) in known]
        saved["state"] = {}
        for key, tensor in prepared.synchronizer.optimizer_state().items():
            index, _, kind = key.removeprefix(prefix).partition(".")
            if key.startswith(prefix) and index.isdigit():
                saved["state"].setdefault(trained[int(index)], {})[kind] = tensor
        return saved

    def take_up(self, raw: bytes) -> None:
        """Go on from what `state` gave, after the script has loaded the weights: the next pass over the data
        begins where it was.

        Raises:
            UsageError: the run had another number of workers or other optimizers, or this one trains already.
        """
        if self._course.has_started:
            raise UsageError("a run goes on from a checkpoint before its first batch, not after it")
        checkpoint = Checkpoint.decode(raw, where="Paceline's part of the checkpoint")
        if len(checkpoint.workers) != self._run.context.size:
            raise UsageError(
                f"the checkpoint was taken with {len(checkpoint.workers)} workers, this run has "
                f"{self._run.context.size}; resume with as many"
            )
        self._go_on(replace(checkpoint, data={}, looks={}))
        for feed in self._run.prepared.feeds.values():
            feed.loader.begin_at()
