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
    if strategy.traits.by_script:
        raise UsageError(f"{name_of(strategy)} has the script itself exchange; choose another strategy")
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
