"""A script's schedulers in runs whose workers come and go: they step when an update is made, and who joins takes up
where they are."""

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import UsageError
from paceline.strategies.replica import hyperparameters
from paceline.training import snapshot
from paceline.training.worker_run import WorkerRun


def hold_back(given: Mapping[str, Any], run: WorkerRun) -> None:
    """Where the optimizer's last step was not applied, the schedulers among these do not step either."""
    for each in given.values():
        if isinstance(each, LRScheduler):
            _hold_back(each, run)


def _hold_back(scheduler: LRScheduler, run: WorkerRun) -> None:
    kind = type(scheduler)

    def step(this: Any, *arguments: Any, **named: Any) -> None:
        if run.prepared.synchronizer.has_updated:
            kind.step(this, *arguments, **named)

    # A class, since whatever hangs on the object itself would be in its state.
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step})


def require_prepared(given: Mapping[str, Any], optimizer: Any) -> None:
    """Raises UsageError for a scheduler that would step where the optimizer does not."""
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    if not any(isinstance(each, LRScheduler) for each in given.values()):
        raise UsageError(
            "with --elastic and --global-batch keep an update may take several steps of the script, in which a "
            "scheduler is to wait: give it to worker.prepare(..., scheduler=scheduler), or use --global-batch grow"
        )


def share(run: WorkerRun, *, is_lacking: bool) -> None:
    """Whoever lacks it takes up what the first worker's script has moved on. Collective call in a pause."""
    prepared = run.prepared
    optimizers = prepared.optimizers.values()
    groups = [dict(group) for optimizer in optimizers for group in hyperparameters(optimizer)]
    own = [groups, {name: thing.state_dict() for name, thing in prepared.extra.items()}]
    said = run.context.collective.broadcast_object(own)
    if is_lacking:
        saved_groups, saved_extra = said
        snapshot.move_on(saved_groups, saved_extra, optimizers, prepared.extra)
