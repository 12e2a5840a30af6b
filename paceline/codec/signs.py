"""One bit an element."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from paceline.codec import bits
from paceline.codec.base import Payload, Shape, TensorCodec, doc, drawing, from_blocks, in_blocks
from paceline.errors import UsageError


@final
@dataclass(frozen=True, kw_only=True)
class OneBit(TensorCodec, name="one-bit"):
    """Each element's sign, times its block's mean magnitude.

    Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019, algorithm 1,
    with blocks for layers; Seide et al., "1-bit stochastic gradient descent", Interspeech 2014, have a value for each
    sign.
    """

    contracts: ClassVar[bool] = True
    feedback: ClassVar[bool] = True
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (0.38, 0.28)

    size: int = doc(2048, "elements that share a scale")

    def __post_init__(self) -> None:
        if self.size < 8 or self.size % 8:
            raise UsageError(f"size must be a multiple of 8, not {self.size}")

    @property
    def block(self) -> int:
        return self.size

    def num_bytes(self, shape: Shape) -> int:
        count = torch.Size(shape).numel()
        return bits.num_bytes(count, 1) + 4 * -(-count // self.size)

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        blocks = in_blocks(tensor, self.size)
        sums = torch.linalg.vector_norm(blocks, ord=1, dim=1)
        counts = torch.full_like(sums, self.size)
        counts[-1:] -= blocks.numel() - tensor.numel()
        return sums / counts, bits.pack((tensor.reshape(-1) >= 0).view(torch.uint8), 1)

    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        scales, packed = payload
        return from_blocks(in_blocks(_plus_minus(packed, like), self.size) * scales[:, None], like)


@final
@dataclass(frozen=True, kw_only=True)
class Sign(TensorCodec, name="sign"):
    """Each element's sign; of many workers, that of the majority. Where there is none, a draw decides.

    Bernstein et al., "signSGD: compressed optimisation for non-convex problems", ICML 2018, algorithm 3. An update is
    the learning rate in every element, so that wants to be far smaller than for a mean of gradients.
    """

    votes: ClassVar[bool] = True
    feedback: ClassVar[bool] = False
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (0.36, 0.21)

    @property
    def block(self) -> int:
        return 8

    def num_bytes(self, shape: Shape) -> int:
        return bits.num_bytes(torch.Size(shape).numel(), 1)

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        flat = tensor.reshape(-1)
        is_plus = flat > 0
        ties = (flat == 0).nonzero()[:, 0]
        if len(ties):
            is_plus[ties] = torch.rand(len(ties), generator=drawing(seed, flat.device), device=flat.device) < 0.5
        return (bits.pack(is_plus.view(torch.uint8), 1),)

    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        return _plus_minus(payload[0], like).view(like.shape).to(like.dtype)


def _plus_minus(packed: Tensor, like: Tensor) -> Tensor:
    """Bits as 1 and -1, float32 of shape (n,)."""
    return bits.unpack(packed, 1, like.numel()).to(torch.float32).mul_(2).sub_(1)
