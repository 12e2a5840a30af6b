"""How far a worker's script is, which workers that train alike have in common in every pause."""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import UsageError


class Progress(NamedTuple):
    """What one worker's script has done so far."""

    num_steps: int = 0
    """Steps of the first optimizer."""
    num_batches: int = 0
    """Batches that it was handed."""

    @property
    def lead(self) -> int:
        """Batches beyond its steps: the same number step after step in most scripts."""
        return self.num_batches - self.num_steps


def require_same(everyone: Sequence[Progress], *, lock_step: bool = True) -> None:
    """Raises UsageError, naming the first rank that is not as far as rank 0. `lock_step`: all ranks can call
    collectives in the training loop."""
    first = everyone[0]
    for rank, progress in enumerate(everyone):
        if progress != first:
            call = joint("worker.all_reduce(loss.detach().clone(), op='max')", lock_step=lock_step)
            raise UsageError(
                f"rank {rank} has taken {progress.num_steps} steps on {progress.num_batches} batches, rank 0 "
                f"{first.num_steps} on {first.num_batches}: every rank must step alike. Decide together whether to "
                f"leave out a batch, or to end, as by {call}. Where it is for a loss that is NaN or infinite, step all "
                "the same: --option nonfinite=skip leaves that step out"
            )


def joint(call: str, *, lock_step: bool) -> str:
    """How a script makes this collective call in its training loop, in words."""
    return call if lock_step else f"{call} inside `with worker.meeting('together')`"
