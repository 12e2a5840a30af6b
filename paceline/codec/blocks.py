"""One byte an element, and a scale for some of them."""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from paceline.codec.base import Payload, Shape, TensorCodec, doc, from_blocks, in_blocks
from paceline.errors import UsageError

_LARGEST = {"int8": 127.0, "fp8": torch.finfo(torch.float8_e4m3fn).max}


@final
@dataclass(frozen=True, kw_only=True)
class Blocks(TensorCodec):
    """Divides each block by its largest magnitude, and rounds to the nearest of one byte.

    Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022, section 2.1, with even steps (int8) or
    those of an 8-bit float of 3 bits of mantissa (fp8, e4m3: Micikevicius et al., "FP8 formats for deep learning",
    2022) instead of dynamic ones.
    """

    seconds_per_gbyte: ClassVar[tuple[float, float]] = (1.0, 0.5)

    form: Literal["int8", "fp8"] = doc("int8", "int8: even steps; fp8: finer ones near zero")
    scales: Literal["blocks", "rows"] = doc("blocks", "one scale for a block of elements, or for a row of a tensor")
    size: int = doc(256, "elements of a block")
    feedback: bool = doc(True, "add what rounding leaves out to the next gradient")

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError(f"size must be at least 1, not {self.size}")

    @property
    def block(self) -> int:
        return self.size

    @property
    def shaped(self) -> bool:
        return self.scales == "rows"

    def num_bytes(self, shape: Shape) -> int:
        count = torch.Size(shape).numel()
        return count + 4 * -(-count // self._width(shape))

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        blocks = in_blocks(tensor, self._width(tuple(tensor.shape)))
        low, high = blocks.aminmax(dim=1)
        scales = torch.maximum(high, -low).div_(_LARGEST[self.form])
        scaled = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        if self.form == "fp8":
            return scales, scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(-1)[: tensor.numel()].clone()
        return scales, scaled.round_().to(torch.int8).view(-1)[: tensor.numel()].clone()

    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        scales, codes = payload
        values = codes.view(torch.float8_e4m3fn) if self.form == "fp8" else codes
        blocks = in_blocks(values, self._width(tuple(like.shape)))
        return from_blocks(blocks * scales[:, None], like)

    def _width(self, shape: Shape) -> int:
        return max(1, shape[-1]) if self.shaped and len(shape) > 1 else self.size
