"""How far a worker's script is, which lock-step workers have in common at every exchange."""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import UsageError


class Progress(NamedTuple):
    """What one worker's script has done so far."""

    num_steps: int = 0
    """Of the first optimizer."""
    num_batches: int = 0
    """That it was handed."""

    @property
    def lead(self) -> int:
        """Batches beyond its steps: the same number step after step in most scripts."""
        return self.num_batches - self.num_steps


def require_same(everyone: Sequence[Progress]) -> None:
    """Raises UsageError, naming the first rank that is not as far as rank 0."""
    first = everyone[0]
    for rank, progress in enumerate(everyone):
        if progress != first:
            raise UsageError(
                f"rank {rank} has taken {progress.num_steps} steps on {progress.num_batches} batches, rank 0 "
                f"{first.num_steps} on {first.num_batches}, so that gradients of different batches met: every rank "
                "must step alike. Decide together whether to leave a batch out, as by "
                "worker.all_reduce(loss.detach().clone(), op='max'), or let --option nonfinite=skip do so"
            )
