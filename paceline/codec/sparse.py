"""A few elements, the others left out."""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from paceline.codec.base import Payload, Shape, TensorCodec, doc, drawing
from paceline.errors import UsageError


@final
@dataclass(frozen=True, kw_only=True)
class TopK(TensorCodec, name="top-k"):
    """The largest magnitudes, with their places.

    Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Stich et al., "Sparsified SGD
    with memory", NeurIPS 2018.
    """

    sparse: ClassVar[bool] = True
    contracts: ClassVar[bool] = True
    feedback: ClassVar[bool] = True
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (5.26, 0.02)

    ratio: float = doc(0.01, "the part of the elements that is sent")

    def __post_init__(self) -> None:
        _require_part(self.ratio)

    @property
    def part(self) -> float:
        return self.ratio

    def num_bytes(self, shape: Shape) -> int:
        return 8 * _count(shape, self.ratio)

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        flat = tensor.reshape(-1)
        places = flat.abs().topk(_count(tuple(tensor.shape), self.ratio), sorted=False).indices
        return flat[places].to(torch.float32), places.to(torch.int32)

    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        values, places = payload
        return _with(like, places.long(), values)


@final
@dataclass(frozen=True, kw_only=True)
class RandomK(TensorCodec, name="random-k"):
    """Elements at random, the same ones on all workers, times d / k, so that the mean of many draws is the tensor.

    Stich et al., "Sparsified SGD with memory", NeurIPS 2018, definition 2.1, made unbiased. Places follow from the
    seed, and do not travel. They are k terms of an arithmetic progression modulo d with a drawn beginning and a drawn
    step: each place is as likely as any other, and nothing of length d has to be drawn.
    """

    linear: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True
    feedback: ClassVar[bool] = False
    seconds_per_gbyte: ClassVar[tuple[float, float]] = (0.17, 0.15)

    ratio: float = doc(0.1, "the part of the elements that is sent")

    def __post_init__(self) -> None:
        _require_part(self.ratio)

    def num_bytes(self, shape: Shape) -> int:
        return 4 * _count(shape, self.ratio)

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        places = self._places(tensor, seed)
        return (tensor.reshape(-1)[places].to(torch.float32) * (tensor.numel() / max(1, len(places))),)

    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        places = self._places(like, seed)
        return _with(like, places, payload[0])

    def _places(self, tensor: Tensor, seed: int) -> Tensor:
        total, count = tensor.numel(), _count(tuple(tensor.shape), self.ratio)
        chance = drawing(seed, torch.device("cpu"))
        first, step = torch.randint(max(1, total), (2,), generator=chance).tolist()
        while math.gcd(step, total) > 1:
            step += 1
        return torch.arange(count, device=tensor.device).mul_(step).add_(first).remainder_(max(1, total))


def _count(shape: Shape, ratio: float) -> int:
    """How many are sent: one at least of those that there are."""
    return math.ceil(ratio * math.prod(shape))


def _with(like: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """A tensor of zeros, but for these values at these places of it as a flat one."""
    flat = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
    return flat.index_copy_(0, places, values.to(like.dtype)).view(like.shape)


def _require_part(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise UsageError(f"ratio must be above 0 and at most 1, not {ratio}")
