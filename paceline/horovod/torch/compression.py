"""What travels in the place of a tensor."""

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor


class Compressor(ABC):
    """Makes a tensor smaller, and back. Used as a class, never made."""

    @staticmethod
    @abstractmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What travels, and what `decompress` has to know."""

    @staticmethod
    @abstractmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """A tensor of the original dtype."""


@final
class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


@final
class FP16Compressor(Compressor):
    """Sends floating-point numbers in half precision."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        dtype: torch.dtype = ctx
        return tensor.to(dtype) if dtype.is_floating_point else tensor


class Compression:
    """What an operation's `compression` may be."""

    none = NoneCompressor
    fp16 = FP16Compressor
