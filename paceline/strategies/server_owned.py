"""A worker's parameters while servers own them: views of memory that the servers write to, and nobody else."""

from typing import final

from paceline.errors import UsageError
from paceline.layout import Layout
from paceline.strategies.digests import digest
from paceline.strategies.flat import lay_parameters
from paceline.strategies.mirror import Mirror
from paceline.strategies.replica import Replica


@final
class ServerOwned:
    """Moves the parameters into `mirror`, and notices a script that changes or moves them."""

    def __init__(self, replica: Replica, layout: Layout, mirror: Mirror) -> None:
        self._replica = replica
        self._places = [view.data_ptr() for view in lay_parameters(replica, layout, mirror.local)]
        self._versions = self._count_changes()
        self._digests: list[int | str] | None = self._own_digests()

    def require_untouched(self, *, rank: int, step: int) -> None:
        """Raises UsageError if the script changed parameters itself, which servers would not know of, or moved them."""
        for parameter, place, spec in zip(self._replica.parameters, self._places, self._replica.specs, strict=True):
            if parameter.data_ptr() != place:
                raise UsageError(
                    f"step {step}: parameter {spec.name!r} was moved or replaced after prepare on rank {rank}; servers "
                    "write to its old place: bring the model to its device and dtype before prepare"
                )
        name = self._changed()
        self._digests = None
        if name is not None:
            raise UsageError(
                f"step {step}: the script changed parameters in place on rank {rank}, but the servers own them and "
                f"would undo it: {name!r}; do so before prepare, or use all-reduce"
            )

    def accept(self, *, looks_closely: bool = False) -> None:
        """Parameters are as they should be.

        Args:
            looks_closely: changes through `.data`, which torch does not count, are to be noticed at the next step.
        """
        looks_closely = looks_closely or self._digests is not None
        self._versions = self._count_changes()
        self._digests = self._own_digests() if looks_closely else None

    def _changed(self) -> str | None:
        """The name of a parameter that anyone but the servers has changed."""
        before, now = self._versions, self._count_changes()
        if before == now and self._digests is not None:
            before, now = self._digests, self._own_digests()
        pairs = zip(self._replica.specs, before, now, strict=True)
        return next((spec.name for spec, one, other in pairs if one != other), None) if before != now else None

    def _own_digests(self) -> list[int | str]:
        return [digest([parameter]) for parameter in self._replica.parameters]

    def _count_changes(self) -> list[int | str]:
        """In-place changes of each parameter by anyone but the servers, so far."""
        return [parameter._version for parameter in self._replica.parameters]
