"""When and where a worker looks whether the script has changed what is not its own, so that no step feels it."""

from operator import attrgetter
from typing import final

import torch
from torch import Tensor

from paceline.arrays import as_array

_ALWAYS_UP_TO, _EVERY = 16, 8

version_of = attrgetter("_version")
"""How often a tensor was changed in place, as far as torch counts; mapped over a list it takes no frame of Python."""


def next_look(step: int) -> int:
    """The step after this one, counted from 1, in which is looked at what usually stays changed once it is changed.
    Looking in every step took more than one per cent of a small convolutional net's."""
    return step + 1 if step < _ALWAYS_UP_TO else step - step % _EVERY + _EVERY


@final
class Window:
    """Some bytes of a tensor, each time others, so that a change of the whole tensor shows whenever they are looked at.

    Args:
        flat: a contiguous tensor on the CPU.
        num_bytes: how many are seen at a time.
    """

    def __init__(self, flat: Tensor, num_bytes: int) -> None:
        # Slices of a memoryview take a third of the time that an array's take.
        self._memory, self._num_bytes = memoryview(as_array(flat.view(torch.uint8))), num_bytes
        self.start = 0

    def read(self) -> bytes:
        """What is seen now."""
        return self._memory[self.start : self.start + self._num_bytes].tobytes()

    def move_on(self) -> None:
        """Go on to the next place, after the last one to the first."""
        following = self.start + self._num_bytes
        self.start = following if following < len(self._memory) else 0
