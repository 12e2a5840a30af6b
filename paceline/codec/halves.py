"""Two bytes an element."""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from paceline.codec.base import Payload, Shape, TensorCodec, doc


@dataclass(frozen=True, kw_only=True)
class Half(TensorCodec):
    """Rounds each element to the nearest of two bytes.

    Not linear: sums of halves would be rounded to halves at every hop. They are decoded, summed in float32, and encoded
    once more.
    """

    contracts: ClassVar[bool] = True
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (0.03, 0.02)
    dtype: ClassVar[torch.dtype]

    feedback: bool = doc(True, "add what rounding leaves out to the next gradient")

    @final
    def num_bytes(self, shape: Shape) -> int:
        return 2 * math.prod(shape)

    @final
    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        return (tensor.to(self.dtype, copy=True),)

    @final
    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        return payload[0].view(like.shape).to(like.dtype, copy=True)


@final
@dataclass(frozen=True, kw_only=True)
class FP16(Half, name="fp16"):
    """10 bits of mantissa, magnitudes up to 65504."""

    dtype: ClassVar[torch.dtype] = torch.float16
    largest: ClassVar[float] = torch.finfo(torch.float16).max


@final
@dataclass(frozen=True, kw_only=True)
class BF16(Half, name="bf16"):
    """7 bits of mantissa, magnitudes as of float32."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16
