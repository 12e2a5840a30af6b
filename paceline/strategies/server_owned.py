"""A worker's parameters while servers own them: views of memory that the servers write to, and nobody else."""

from typing import final

from paceline.errors import UsageError
from paceline.layout import Layout
from paceline.strategies.flat import lay_parameters
from paceline.strategies.mirror import Mirror
from paceline.strategies.replica import Replica


@final
class ServerOwned:
    """Moves the parameters into `mirror`, and notices a script that changes or moves them."""

    def __init__(self, replica: Replica, layout: Layout, mirror: Mirror) -> None:
        self._replica = replica
        self._places = [view.data_ptr() for view in lay_parameters(replica, layout, mirror.local)]
        self._num_changes = self._count_changes()

    def require_untouched(self, *, rank: int, step: int) -> None:
        """Raises UsageError if the script changed parameters itself, which servers would not know of, or moved them."""
        for parameter, place, spec in zip(self._replica.parameters, self._places, self._replica.specs, strict=True):
            if parameter.data_ptr() != place:
                raise UsageError(
                    f"step {step}: parameter {spec.name!r} was moved or replaced after prepare; servers write "
                    "to its old place: bring the model to its device and dtype before prepare"
                )
        if self._count_changes() != self._num_changes:
            raise UsageError(
                f"step {step}: the script changed parameters in place on rank {rank}, but the servers own "
                "them and would undo it; do so before prepare, or use all-reduce"
            )

    def accept(self) -> None:
        """What has been changed up to now is as it should be."""
        self._num_changes = self._count_changes()

    def _count_changes(self) -> int:
        """In-place changes by anyone but the servers, so far."""
        return sum(parameter._version for parameter in self._replica.parameters)
