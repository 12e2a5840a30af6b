"""In what form tensors travel: encoded before they leave, decoded where they arrive.

A codec is a pair of pure functions; it knows no network, and keeps nothing (`codec/memory.py` does). What it says of
itself decides where it may be used, and how what several workers encoded is joined. The bytes that move are those of
the payload, counted and never estimated.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from paceline.pieces import Piece

Payload = tuple[Tensor, ...]
"""The encoded form of one tensor. Its shapes and dtypes depend only on that tensor's shape."""
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Codec(Piece, ABC):
    """One form of tensors on their way."""

    linear: ClassVar[bool] = False
    """Payloads are added as they are, in their own dtype, and the sum decodes to the sum of the tensors. If it draws
    numbers, all workers must draw the same."""
    unbiased: ClassVar[bool] = False
    """What is decoded is in expectation what was encoded."""
    sparse: ClassVar[bool] = False
    """A payload holds few elements; the sum of several holds more, so everyone gets everyone's."""
    votes: ClassVar[bool] = False
    """Workers' tensors are joined by the sign of their sum, which has no size."""
    contracts: ClassVar[bool] = False
    """What is left out of a tensor is less than the tensor, in squares: the condition of error feedback, and of
    estimates that neighbours share. Unbiased codecs, and signs without a size, leave out more."""
    joint: ClassVar[bool] = False
    """A mean of all workers is taken half-way, so one worker alone can neither encode nor decode."""
    largest: ClassVar[float] = math.inf
    """The largest magnitude of an element that it holds."""
    adapts: ClassVar[bool] = False
    """It stands for one of several, and is none itself."""
    seconds_per_gbyte: ClassVar[tuple[float, float]]
    """Seconds to encode and to decode a gigabyte of float32 on one core, as `benchmarks/coding.py` measured it: for
    plans and simulated clusters."""

    @property
    @abstractmethod
    def feedback(self) -> bool:
        """What is left out is added to the next tensor. Never where decoding gives more than there was, as unbiased
        codecs do: the memory would grow without bound."""

    @property
    def decay(self) -> float:
        """The part of what was left out that is added to the next tensor."""
        return 1.0

    @property
    def part(self) -> float:
        """The share of the elements, or of as many coefficients, that is sent."""
        return 1.0

    @property
    def shaped(self) -> bool:
        """Whether it looks at tensors in their shapes, rather than at all of them as one flat vector."""
        return False

    @property
    def first_step(self) -> int:
        """Steps before this one go uncoded."""
        return 0

    @abstractmethod
    def num_bytes(self, shape: Shape) -> int:
        """How large the payload for a float32 tensor of this shape is."""


class TensorCodec(Codec):
    """Encodes one worker's tensor by itself."""

    @property
    def block(self) -> int:
        """Elements that are encoded together: a flat tensor may be cut at multiples of so many."""
        return 1

    @abstractmethod
    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        """The tensor is not changed, and no element of the payload shares its memory."""

    @abstractmethod
    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        """A new tensor of the shape, dtype and device of `like`, from a payload that was encoded with this seed.

        Raises IndexError or RuntimeError for a payload that cannot have been encoded from such a tensor.
        """


class JointCodec(Codec):
    """Averages all workers' tensors through means of something smaller."""

    joint: ClassVar[bool] = True

    @abstractmethod
    def begin(self, shapes: Sequence[Shape], like: Tensor, *, seed: int) -> Tensor:
        """What is kept from one step to the next besides what is left out: the same on all workers, 1-D."""

    @abstractmethod
    def average(
        self,
        tensors: Sequence[Tensor],
        kept: Tensor,
        *,
        out: Sequence[Tensor],
        mean: Callable[[Tensor], None],
        left_out: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Average all workers' tensors, approximately. Returns what is kept for the next time.

        Args:
            tensors: this worker's, of the shapes that `begin` was given. They become what the mean will not have of
                them.
            kept: what `begin`, or the last call, gave. It is not changed.
            out: gets the mean, in tensors of the same shapes.
            mean: averages a tensor over all workers, in place.
            left_out: called once `tensors` are what is left out, before this worker has given the last that others need
                for their means.
        """


@final
@dataclass(frozen=True)
class Form:
    """What payloads of tensors of one shape look like, so that they can travel as bytes alone."""

    parts: tuple[tuple[torch.dtype, Shape], ...]

    @classmethod
    def of(cls, payload: Payload) -> "Form":
        return cls(tuple((tensor.dtype, tuple(tensor.shape)) for tensor in payload))

    @property
    def num_bytes(self) -> int:
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.parts)

    def read(self, raw: Tensor) -> Payload:
        """The inverse of `as_bytes`; tensors may share the memory of `raw`. Raises ValueError for another size."""
        if raw.numel() != self.num_bytes:
            raise ValueError(f"{raw.numel()} bytes came for a payload of {self.num_bytes}")
        found, start = [], 0
        for dtype, shape in self.parts:
            stop = start + dtype.itemsize * math.prod(shape)
            part = raw[start:stop]
            is_aligned = part.data_ptr() % dtype.itemsize == 0 and part.storage_offset() % dtype.itemsize == 0
            found.append((part if is_aligned else part.clone()).view(dtype).view(shape))
            start = stop
        return tuple(found)


def as_bytes(payload: Payload) -> Tensor:
    """A payload as one uint8 tensor."""
    raws = [tensor.reshape(-1).view(torch.uint8) for tensor in payload]
    return raws[0] if len(raws) == 1 else torch.cat(raws)


def num_bytes(payload: Payload) -> int:
    return sum(tensor.nbytes for tensor in payload)


def drawing(seed: int, device: torch.device) -> torch.Generator:
    """What a codec draws its numbers from."""
    return torch.Generator(device).manual_seed(seed)


def in_blocks(tensor: Tensor, size: int) -> Tensor:
    """A flat tensor's elements in float32, shape (blocks, size); zeros fill the last block."""
    flat = tensor.reshape(-1).to(torch.float32)
    missing = -flat.numel() % size
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, size)


def largest_of(blocks: Tensor) -> Tensor:
    """Each block's largest magnitude. Twenty times as quick as `aminmax`, which is not vectorised along a dimension."""
    return torch.maximum(blocks.amax(dim=1), blocks.amin(dim=1).neg_())


def from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """The inverse of `in_blocks`."""
    return blocks.reshape(-1)[: like.numel()].view(like.shape).to(like.dtype)


def doc(default: Any, text: str) -> Any:
    """A codec's option, with its line of documentation."""
    return field(default=default, metadata={"doc": text})
