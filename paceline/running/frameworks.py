"""How a framework with a training loop of its own begins, and which runs it cannot follow."""

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.engines.world import current
from paceline.errors import UsageError
from paceline.strategies import build, name_of, settings_of
from paceline.strategies.global_model import average as average_over_workers
from paceline.training.sharding import RoundBatches, ShardedLoader
from paceline.training.worker import Worker, init


def join(how: str) -> Worker:
    """The worker of a framework's loop, which saves and loads itself: `how`, in the framework's words.

    Raises:
        UsageError: the run's loop must be the script's, or checkpoints Paceline's.
    """
    worker = init()
    world = current()
    assert world is not None
    if worker.strategy.traits.by_script:
        raise UsageError(
            f"under {name_of(worker.strategy)} the script itself exchanges, and this one leaves that to its framework: "
            "choose another strategy, such as all-reduce, the mean of all workers' gradients at each step"
        )
    if world.config.elastic is not None:
        raise UsageError("--elastic repeats steps of the script's own loop; leave it out, and resume from a checkpoint")
    if world.context.pacing.is_simulated:
        raise UsageError(
            "--engine virtual has all workers in one process, for which the framework is not made; use --engine ray"
        )
    if worker.goes_on_by:  # the script has said it, or a framework on top of this one
        return worker
    if worker.strategy.participation() is not None:
        worker.saves_itself("with clients it cannot go on from one; run it again from its start, with another --out")
    else:
        worker.saves_itself(f"run it again with another --out, and have it go on from its last one by {how}")
    return worker


def require_strategy(worker: Worker, wanted: str | None) -> None:
    """Raises UsageError if the run has another strategy than the script asks for."""
    if wanted is not None and build(wanted) != worker.strategy:
        options = [f"{name}={value}" for name, value in settings_of(worker.strategy).items()]
        found = ":".join([name_of(worker.strategy), *options])
        raise UsageError(
            f"the script asks for {wanted}, and is started under {found}: start it by `paceline run "
            f"SCRIPT --strategy {wanted} --workers N`, or name no strategy in the script, which takes the run's"
        )


def agree_on(average: nn.Module) -> None:
    """Have a model that each worker has made of its own hold the mean of all workers'. Collective call in a meeting."""
    world = current()
    assert world is not None
    average_over_workers((*average.parameters(), *average.buffers()), world.context.collective)


def begin(
    worker: Worker, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], loader: DataLoader[Any]
) -> ShardedLoader | RoundBatches:
    """Prepare what the framework trains. Returns the training batches, by rounds where there are clients."""
    kinds: dict[str, Sequence[Any]] = {"model": models, "optimizer": optimizers}
    named = {
        kind if len(things) == 1 else f"{kind}_{number}": thing
        for kind, things in kinds.items()
        for number, thing in enumerate(things)
    }
    *_, prepared = worker.prepare(**named, loader=loader)
    batches = cast(ShardedLoader, prepared)
    if batches.roster is None:
        return batches
    return RoundBatches(batches, size=worker.size, is_over=lambda: worker.is_over)
