"""What one worker sends another: a model's values and one number, in one buffer."""

from typing import Protocol, final

import torch
from torch import Tensor

from paceline.layout import Layout

_NUMBER = torch.float64


class Message(Protocol):
    """What travels, and where it is put."""

    buffer: Tensor
    """uint8, of as many bytes with every sender."""


@final
class Parcel:
    """One message. A mixer's own parcel holds the parameters themselves."""

    def __init__(self, layout: Layout, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.buffer = torch.zeros(layout.num_bytes + _NUMBER.itemsize, dtype=torch.uint8, device=device)
        self.values = [segment.view(self.buffer) for segment in layout.segments]
        """A 1-D tensor for each parameter group and dtype."""
        self._number = self.buffer[layout.num_bytes :].view(_NUMBER)

    @property
    def number(self) -> float:
        return float(self._number)

    @number.setter
    def number(self, value: float) -> None:
        self._number.fill_(value)

    def alike(self) -> "Parcel":
        """An empty one of the same form."""
        return Parcel(self.layout, self.buffer.device)
