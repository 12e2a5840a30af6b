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
    """Passes without gradients have batches, as a script needs them that finds the statistics of averaged weights; but
    for those of a script all of whose passes are without, which may be training's.

    The script comes to the evaluations of its remaining epochs at one place, time and again: there the first pass has
    batches, and later ones are empty, which is told. Those of torch's `update_bn` always have them, since it forgets
    the statistics first.
    """

    def __init__(self) -> None:
        self._has_gradients = self._has_told = False
        self._places: set[tuple[tuple[CodeType, int], ...]] = set()

    def begin(self) -> None:
        """A pass begins, before the end or after it."""
        self._has_gradients |= torch.is_grad_enabled()

    def has_batches(self) -> bool:
        """Of the pass that begins after the end; called by the loader's own iteration."""
        if torch.is_grad_enabled() or not self._has_gradients:
            return False
        place = tuple((frame.f_code, line) for frame, line in walk_stack(sys._getframe(2)))
        is_first = place not in self._places
        self._places.add(place)
        if is_first or any(code is update_bn.__code__ for code, _ in place):
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
