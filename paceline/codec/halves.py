"""Two bytes an element."""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from paceline.codec.base import Payload, Shape, TensorCodec, doc

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@final
@dataclass(frozen=True, kw_only=True)
class Half(TensorCodec):
    """Rounds each element to the nearest of two bytes.

    Not linear: sums of halves would be rounded to halves at every hop. They are decoded, summed in float32, and encoded
    once more.
    """

    seconds_per_gbyte: ClassVar[tuple[float, float]] = (0.35, 0.3)

    form: Literal["fp16", "bf16"] = doc("bf16", "fp16 (10 bits of mantissa, up to 65504) or bf16 (7 bits, any size)")
    feedback: bool = doc(True, "add what rounding leaves out to the next gradient")

    def num_bytes(self, shape: Shape) -> int:
        return 2 * torch.Size(shape).numel()

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        return (tensor.to(_DTYPES[self.form], copy=True),)

    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        return payload[0].view(like.shape).to(like.dtype, copy=True)
