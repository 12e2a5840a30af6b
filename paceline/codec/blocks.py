"""One byte an element, and a scale for some of them."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from paceline.codec.base import Payload, Shape, TensorCodec, doc, from_blocks, in_blocks, largest_of
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Blocks(TensorCodec):
    """Divides each block by its largest magnitude, and rounds to the nearest of one byte.

    Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022, section 2.1, with other steps.
    """

    contracts: ClassVar[bool] = True
    top: ClassVar[float]
    """What a block's largest magnitude becomes in its byte. Blocks hold elements of any size."""

    scales: Literal["blocks", "rows"] = doc("blocks", "one scale for a block of elements, or for a row of a tensor")
    size: int = doc(256, "elements of a block")
    feedback: bool = doc(True, "add what rounding leaves out to the next gradient")

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError(f"size must be at least 1, not {self.size}")

    @final
    @property
    def block(self) -> int:
        return self.size

    @final
    @property
    def shaped(self) -> bool:
        return self.scales == "rows"

    @final
    def num_bytes(self, shape: Shape) -> int:
        count = torch.Size(shape).numel()
        return count + 4 * -(-count // self._width(shape))

    @final
    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        blocks = in_blocks(tensor, self._width(tuple(tensor.shape)))
        scales = largest_of(blocks).div_(self.top)
        scaled = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        return scales, self.rounded(scaled).view(-1)[: tensor.numel()].clone()

    @final
    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        scales, codes = payload
        blocks = in_blocks(self.read(codes), self._width(tuple(like.shape)))
        return from_blocks(blocks * scales[:, None], like)

    @abstractmethod
    def rounded(self, scaled: Tensor) -> Tensor:
        """Round each element to one byte; the argument may be overwritten."""

    @abstractmethod
    def read(self, codes: Tensor) -> Tensor:
        """Bytes as what they stand for, of any dtype."""

    def _width(self, shape: Shape) -> int:
        return max(1, shape[-1]) if self.shaped and len(shape) > 1 else self.size


@final
@dataclass(frozen=True, kw_only=True)
class Int8(Blocks, name="int8"):
    """Even steps."""

    top: ClassVar[float] = 127.0
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (0.11, 0.05)

    def rounded(self, scaled: Tensor) -> Tensor:
        return scaled.round_().to(torch.int8)

    def read(self, codes: Tensor) -> Tensor:
        return codes


@final
@dataclass(frozen=True, kw_only=True)
class FP8(Blocks, name="fp8"):
    """Finer steps near zero: a float of 3 bits of mantissa (e4m3: Micikevicius et al., "FP8 formats for deep learning",
    2022)."""

    top: ClassVar[float] = 448.0
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (0.24, 1.62)

    def rounded(self, scaled: Tensor) -> Tensor:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def read(self, codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn)
