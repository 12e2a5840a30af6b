"""Gradients that a script sets itself, without a backward pass, and what workers that average make of them."""

import warnings
from typing import final
from weakref import ref

from torch import Tensor

from paceline.errors import UsageError
from paceline.strategies.replica import Replica


@final
class SetGradients:
    """
    Args:
        is_averaged: workers average gradients.
    """

    def __init__(self, replica: Replica, *, rank: int, is_averaged: bool) -> None:
        self._replica, self._rank, self._is_averaged = replica, rank, is_averaged
        self._has_told = False
        self.left: tuple[ref[Tensor], int] | None = None
        """The first gradient that the last step was made with, and its version."""

    def are_as_left(self) -> bool:
        """Whether the gradients are those that the last step was made with, to judge by the first one."""
        gradient = self._replica.parameters[0].grad
        if gradient is None or self.left is None:
            return gradient is None and self.left is None
        return self.left[0]() is gradient and self.left[1] == gradient._version

    def allow(self) -> None:
        """Take gradients that the script has set. Where workers' gradients are averaged, warn once that these are, too.

        Raises UsageError if one of them was changed in place.
        """
        is_new = self.left is None or self.left[0]() is not self._replica.parameters[0].grad
        if self._is_averaged and is_new and any(each.grad is not None for each in self._replica.parameters):
            self._refuse_changed_in_place()
            self._tell_that_it_is_averaged()

    def _refuse_changed_in_place(self) -> None:
        for parameter, spec in zip(self._replica.parameters, self._replica.specs, strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient._version:
                raise UsageError(
                    f"rank {self._rank}: the script set the gradient of {spec.name!r} itself and changed it in place, "
                    "before step() averages it over workers; call loss.backward(), whose gradients are averaged when "
                    "the script sees them, or set a copy (parameter.grad = gradient.clone()) if each worker's own "
                    "gradient is to be changed"
                )

    def _tell_that_it_is_averaged(self) -> None:
        """Tell, once, that gradients which the script sets are averaged: nothing tells one from one that was
        clipped."""
        if self._has_told or self._rank:
            return
        self._has_told = True
        warnings.warn(
            f"rank {self._rank}: the script sets the gradient of {self._replica.specs[0].name!r} and others itself. "
            "Workers average what each has set: what was clipped or normalised before is each worker's own gradient, "
            "and not the mean; to change the mean, call loss.backward() and change parameter.grad after it",
            stacklevel=7,
        )
