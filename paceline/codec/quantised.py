"""Few levels, drawn so that the mean of many draws is what was encoded."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from paceline.codec import bits
from paceline.codec.base import Payload, Shape, TensorCodec, doc, drawing, from_blocks, in_blocks, largest_of
from paceline.errors import UsageError


@final
@dataclass(frozen=True, kw_only=True)
class QSGD(TensorCodec, name="qsgd"):
    """Rounds each element, as a part of its block's norm, up or down at random.

    Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding", NeurIPS 2017, sections
    3.1 and 4, with codes of fixed length instead of Elias's.
    """

    unbiased: ClassVar[bool] = True
    feedback: ClassVar[bool] = False
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (2.24, 0.29)

    bits: int = doc(4, "bits of an element, its sign included: 2, 4 or 8, so 1, 7 or 127 levels above 0")
    size: int = doc(512, "elements of a block")

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise UsageError(f"bits must be 2, 4 or 8, not {self.bits}")
        if self.size < 1:
            raise UsageError(f"size must be at least 1, not {self.size}")

    @property
    def block(self) -> int:
        return self.size * 4  # a multiple of a byte's codes

    def num_bytes(self, shape: Shape) -> int:
        return _num_bytes(shape, self.bits, self.size)

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        blocks = in_blocks(tensor, self.size)
        return _drawn(blocks, blocks.norm(dim=1), self.bits, tensor.numel(), seed)

    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        return _levels(payload, self.bits, self.size, like)


@final
@dataclass(frozen=True, kw_only=True)
class TernGrad(TensorCodec, name="terngrad"):
    """Each element becomes 0, or its block's largest magnitude with its own sign, at random.

    Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NeurIPS 2017,
    section 3.1, with blocks for layers. Its clip at 2.5 standard deviations is biased, and left out.
    """

    unbiased: ClassVar[bool] = True
    feedback: ClassVar[bool] = False
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (2.47, 0.24)

    size: int = doc(512, "elements of a block")

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError(f"size must be at least 1, not {self.size}")

    @property
    def block(self) -> int:
        return self.size * 4

    def num_bytes(self, shape: Shape) -> int:
        return _num_bytes(shape, 2, self.size)

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        blocks = in_blocks(tensor, self.size)
        return _drawn(blocks, largest_of(blocks), 2, tensor.numel(), seed)

    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        return _levels(payload, 2, self.size, like)


def _num_bytes(shape: Shape, num_bits: int, size: int) -> int:
    count = torch.Size(shape).numel()
    return bits.num_bytes(count, num_bits) + 4 * -(-count // size)


def _drawn(blocks: Tensor, norms: Tensor, num_bits: int, count: int, seed: int) -> Payload:
    """Draw each block as norm / levels, and for each element a whole number of these."""
    levels = (1 << num_bits - 1) - 1
    steps = norms / levels
    chance = torch.rand(blocks.shape, generator=drawing(seed, blocks.device), device=blocks.device)
    # The floor of x + u is x's, or with the probability of what x has above it, one more.
    drawn = chance.add_(blocks / steps.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).floor_()
    codes = drawn.clamp_(-levels, levels).add_(levels).to(torch.uint8).view(-1)[:count]
    return steps, bits.pack(codes, num_bits)


def _levels(payload: Payload, num_bits: int, size: int, like: Tensor) -> Tensor:
    steps, packed = payload
    levels = (1 << num_bits - 1) - 1
    drawn = in_blocks(bits.unpack(packed, num_bits, like.numel()), size).sub_(levels)
    return from_blocks(drawn.mul_(steps[:, None]), like)
