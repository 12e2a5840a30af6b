"""Passes over a loader when the run has ended: which of them have batches."""

import sys
import warnings
from traceback import walk_stack
from types import CodeType
from typing import final

import torch
from torch.optim.swa_utils import update_bn


@final
class AfterEnd:
    """Passes without gradients have batches: a script needs them to find the statistics of averaged weights. Where all
    passes of a script are without, they may be its training, and have none.

    A script that goes through its remaining epochs, whose training is empty, comes to their evaluations at one place
    time and again: there the first pass has batches, and later ones are empty, which is told. Those of torch's
    `update_bn` always have them, since it forgets the statistics first.
    """

    def __init__(self) -> None:
        self._has_gradients = self._has_told = False
        self._num_empty = 0  # passes of training since the end
        self._places: dict[tuple[tuple[CodeType, int], ...], int] = {}  # and how many had been at the first pass there

    def begin(self) -> None:
        """A pass begins, before the end or after it."""
        self._has_gradients |= torch.is_grad_enabled()

    def has_batches(self) -> bool:
        """Whether a pass that begins after the end has batches; called by the loader's own iteration."""
        if torch.is_grad_enabled():
            self._num_empty += 1
            return False
        if not self._has_gradients:
            return False
        place = tuple((frame.f_code, line) for frame, line in walk_stack(sys._getframe(1)))
        is_next_epoch = self._places.setdefault(place, self._num_empty) < self._num_empty
        if not is_next_epoch or any(code is update_bn.__code__ for code, _ in place):
            return True
        if not self._has_told:
            self._has_told = True
            warnings.warn(
                "the run has ended, and the script goes over the loader without gradients where it has done so since: "
                "such passes are empty from here on, as the remaining epochs of training are. Leave the script's loop "
                "where worker.is_over",
                stacklevel=3,
            )
        return False
