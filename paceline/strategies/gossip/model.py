"""A worker's parameters, laid where a mixer mixes and neighbours read them."""

from typing import final

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.layout import by_group
from paceline.strategies.base import Context
from paceline.strategies.flat import lay_parameters
from paceline.strategies.gossip.parcel import Parcel
from paceline.strategies.replica import Replica
from paceline.strategies.untouched import Untouched


@final
class FlatModel:
    """Moves the parameters into a parcel."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.parcel = Parcel(by_group(replica.specs), replica.parameters[0].device)
        self._places = [view.data_ptr() for view in lay_parameters(replica, self.parcel.layout, self.parcel.buffer)]
        self._untouched = Untouched(replica.parameters, [self.parcel.buffer])
        self.accept = self._untouched.accept

    def require_in_place(self, *, rank: int, step: int) -> None:
        """Raises UsageError if the script moved a parameter, whose old place would be mixed."""
        for parameter, place, spec in zip(self.replica.parameters, self._places, self.replica.specs, strict=True):
            if parameter.data_ptr() != place:
                raise UsageError(
                    f"step {step}: parameter {spec.name!r} was moved or replaced after prepare on rank {rank}, where "
                    "neighbours mix its old place: bring the model to its device and dtype before prepare"
                )

    def require_untouched(self, *, rank: int, step: int) -> None:
        """Raises UsageError if the script changed parameters since `accept`, which mixing beside would undo."""
        found = self._untouched.look()
        if found is not None:
            name = self.replica.specs[found].name
            raise UsageError(
                f"step {step}: the script changed parameter {name!r} in place on rank {rank}, while "
                "neighbours mix a copy of it, which would undo that; do so before prepare, or use --strategy gossip"
            )

    def scale_gradients(self, factor: float) -> None:
        if factor != 1.0:
            for gradient in self.gradients():
                gradient.mul_(factor)

    def corrupt(self, context: Context, *, step: int) -> None:
        """A hostile worker's gradients, which move the model that neighbours get, become what its attack makes of
        them."""
        if context.hostility is not None:
            own = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.replica.parameters]
            context.corrupt(own, step)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.replica.parameters if parameter.grad is not None]
