"""A worker's parameters while servers own them: views of memory that the servers write to, and nobody else."""

from typing import final

from paceline.errors import UsageError
from paceline.layout import Layout
from paceline.strategies.flat import lay_parameters
from paceline.strategies.mirror import Mirror
from paceline.strategies.replica import Replica
from paceline.strategies.untouched import Untouched


@final
class ServerOwned:
    """Moves the parameters into `mirror`, and notices a script that changes or moves them."""

    def __init__(self, replica: Replica, layout: Layout, mirror: Mirror) -> None:
        self._replica = replica
        lay_parameters(replica, layout, mirror.local)
        self._places = [parameter.data_ptr() for parameter in replica.parameters]
        apart = [replica.parameters[index].detach() for index in sorted(replica.by_rows)]
        whole = [weight.view(-1) for weight in apart if weight.is_contiguous()]
        self.untouched = Untouched(replica.parameters, [mirror.local, *whole])

    def changed(self) -> str | None:
        """The name of a parameter that the script has changed or moved, as far as can be told."""
        here = [parameter.data_ptr() for parameter in self._replica.parameters]
        moved = [index for index, place in enumerate(self._places) if here[index] != place]
        found = moved[0] if moved else self.untouched.look()
        return None if found is None else self._replica.specs[found].name

    def require_in_place(self, *, rank: int, step: int) -> None:
        """Raises UsageError if the script moved a parameter."""
        for parameter, place, spec in zip(self._replica.parameters, self._places, self._replica.specs, strict=True):
            if parameter.data_ptr() != place:
                raise UsageError(
                    f"step {step}: parameter {spec.name!r} was moved or replaced after prepare on rank {rank}; servers "
                    "write to its old place: bring the model to its device and dtype before prepare"
                )

    def require_untouched(self, *, rank: int, step: int) -> None:
        """Raises UsageError if the script changed parameters in place, which servers would not know of."""
        found = self.untouched.look()
        if found is not None:
            raise UsageError(
                f"step {step}: the script changed parameters in place on rank {rank}, but the servers own them and "
                f"would undo it: {self._replica.specs[found].name!r}; do so before prepare, or use all-reduce"
            )
