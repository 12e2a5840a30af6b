"""What a framework with a training loop of its own cannot follow, said before it begins."""

from paceline.engines.world import current
from paceline.errors import UsageError
from paceline.strategies import build, name_of
from paceline.strategies.base import Strategy
from paceline.training.worker import Worker


def require_possible(strategy: Strategy) -> None:
    """Raises UsageError for a run whose loop must be the script's."""
    world = current()
    assert world is not None
    if strategy.participation() is not None or strategy.traits.by_script:
        raise UsageError(
            f"{name_of(strategy)} needs the script's own training loop, whose passes over the data differ in length; "
            "write it with worker.prepare, or choose a strategy without clients"
        )
    if strategy.traits.takes_first_comers:
        raise UsageError(
            f"under {name_of(strategy)} servers go on with those workers that come first, and those who wait for the "
            "others to validate or save keep them from going on; use diloco or ps-bsp without backup_workers, or the "
            "script's own training loop"
        )
    if world.config.elastic is not None:
        raise UsageError("--elastic repeats steps of the script's own loop; leave it out, and resume from a checkpoint")
    if world.context.pacing.is_simulated:
        raise UsageError(
            "--engine virtual has all workers in one process, for which the framework is not made; use --engine ray"
        )
    if world.checkpoint is not None:
        raise UsageError("--resume goes on from Paceline's checkpoints; resume from the framework's own, as it does")


def require_strategy(worker: Worker, wanted: str | None) -> None:
    """Raises UsageError if the run has another strategy than the script asks for."""
    if wanted is not None and build(wanted) != worker.strategy:
        raise UsageError(
            f"the script asks for {wanted}, and is started under {name_of(worker.strategy)}: start it by `paceline run "
            f"SCRIPT --strategy {wanted} --workers N`, or name no strategy in the script, which takes the run's"
        )
