"""Has all workers begin alike: models on each one's device, of the same tensors, settings and values."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from paceline.checkpoint import Checkpoint
from paceline.errors import UsageError
from paceline.strategies.replica import (
    Replica,
    copy_from_first,
    named_parameters_of,
    require_joint_changes,
    require_same_tensors,
)
from paceline.strategies.settings import require_same_settings
from paceline.training import snapshot
from paceline.training.worker_run import WorkerRun


def begin_alike(
    run: WorkerRun,
    model: nn.Module,
    whole: Replica,
    optimizers: Collection[torch.optim.Optimizer],
    checkpoint: Checkpoint | None,
    *,
    may_differ: bool,
) -> None:
    """Bring the models to the device, and to rank 0's state, or the checkpoint's. Collective call.

    Args:
        may_differ: the checkpoint may be of another number of workers.

    Raises:
        UsageError, TensorMismatch: workers have different models or settings.
    """
    context = run.context
    _move(model, optimizers, context.device)
    if context.size > 1:
        require_joint_changes(model, averages_gradients=run.traits.averages_gradients)
        require_same_tensors(whole, context.collective)
        _require_same_saving(run)
        for optimizer in optimizers:
            require_same_settings(optimizer, context.collective)
    if checkpoint is not None:
        num_workers = None if may_differ else context.size
        snapshot.load_model(model, checkpoint, num_workers=num_workers, seed=run.config.seed)
    if context.size > 1:
        copy_from_first(model, context.collective)


def _require_same_saving(run: WorkerRun) -> None:
    """Raises UsageError on every rank unless all save the run, or none does. Collective call."""
    everyone = run.context.collective.all_gather_object(run.goes_on_by)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise UsageError(
                f"worker.saves_itself: rank 0 said {everyone[0]!r} and rank {rank} {theirs!r}; have all say the same, "
                "or none"
            )


def _move(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """Bring the model to the worker's device in place, so that optimizers keep its parameters, and their state."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                    state[name] = value.to(device)
    for _, parameter in named_parameters_of(model):
        parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
