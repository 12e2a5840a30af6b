"""In what form tensors travel: encoded before they leave, decoded where they arrive.

A codec is a pure pair of functions over explicit memory; it knows no network. The bytes that move are those of the
payload, counted and never estimated.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from paceline.pieces import Piece

Payload = tuple[Tensor, ...]
"""What travels for one tensor."""


class Encoded(NamedTuple):
    """A tensor that is ready to leave."""

    payload: Payload
    memory: Tensor | None
    """What the codec is given with the next tensor, such as what this payload leaves out."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.payload)


class Codec(Piece, ABC):
    """One form of a tensor on its way."""

    linear: ClassVar[bool]
    """The sum of payloads, of the same shapes on every worker, decodes to the sum of the tensors."""
    unbiased: ClassVar[bool]
    """What is decoded is in expectation what was encoded."""

    def start(self, like: Tensor) -> Tensor | None:
        """The memory before the first tensor of this shape; none: the codec keeps none."""
        return None

    @abstractmethod
    def encode(self, tensor: Tensor, memory: Tensor | None) -> Encoded:
        """Neither argument is changed."""

    @abstractmethod
    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        """A new tensor of the shape, dtype and device of `like`."""


@final
class Half(Codec):
    """Two bytes an element, rounded to the nearest; what rounding leaves out is added to the next tensor.

    Error feedback: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014, section 2.1.
    """

    linear = True
    unbiased = False

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self._dtype = dtype

    def start(self, like: Tensor) -> Tensor | None:
        return torch.zeros_like(like)

    def encode(self, tensor: Tensor, memory: Tensor | None) -> Encoded:
        whole = tensor if memory is None else tensor + memory
        rounded = whole.to(self._dtype)
        left = whole - rounded
        # Nothing of a tensor that is not finite, or that the form cannot hold, is owed to the next.
        return Encoded((rounded,), None if memory is None else left.where(left.isfinite(), 0.0))

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        return payload[0].to(like.dtype)
