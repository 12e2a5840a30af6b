"""When and where a worker looks whether the script has changed what is not its own, so that no step feels it."""

from typing import final

import torch
from torch import Tensor

from paceline.arrays import as_array

_ALWAYS_UP_TO, _EVERY = 16, 8


def is_looked_at(step: int) -> bool:
    """Whether what usually stays changed once it is changed is looked at in this step, counted from 1. Looking in every
    step took more than one per cent of a small convolutional net's."""
    return step <= _ALWAYS_UP_TO or step % _EVERY == 0


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
        self._step = 1
        self.start = 0
        self.is_open = True

    def read(self) -> bytes:
        """What is seen now; nothing in a step in which nobody looks."""
        return self._memory[self.start : self.start + self._num_bytes].tobytes() if self.is_open else b""

    def next_step(self) -> None:
        """Go on to the next place, after the last one to the first."""
        self._step += 1
        self.is_open = is_looked_at(self._step)
        if self.is_open:
            following = self.start + self._num_bytes
            self.start = following if following < len(self._memory) else 0
