"""Notices a script that trains and never calls the optimizer's step, which is where workers meet."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from paceline.errors import UsageError

_SAMPLE = 64
"""Elements of each parameter that are compared."""


@final
class Unstepped:
    """Compares the parameters after two batches of a script that has not called `optimizer.step()` yet."""

    def __init__(self, parameters: Sequence[Tensor], *, rank: int) -> None:
        self._parameters, self._rank = parameters, rank
        self._before: list[Tensor] | None = None

    def forget(self) -> None:
        """The parameters are about to become others by no doing of the script's, as where a client's turn begins."""
        self._before = None

    def look(self, *, has_trained: bool) -> None:
        """The script has not stepped yet, and asks for its next batch.

        Raises:
            UsageError: it changes the parameters by itself.
        """
        if not has_trained:
            return
        now = [parameter.detach().flatten()[:_SAMPLE].clone() for parameter in self._parameters]
        before, self._before = self._before, now
        if before is not None and not all(map(torch.equal, before, now)):
            raise UsageError(
                f"rank {self._rank}: the script changes the parameters batch after batch and never calls "
                "optimizer.step(), which is where workers meet and steps are counted; let the prepared optimizer's "
                "step() make the change (an optimizer with a first and a second step: in its step(closure))"
            )
