"""Messages with tensors as bytes; tensors in memory that both ends share go as their place there."""

from __future__ import annotations

import io
import pickle
from typing import Any, final

import torch
from torch import Tensor

from paceline.comm.shared_memory.block import SharedBlock


@final
class Carrier:
    """One end of what a worker and its deputy say to each other. Both share the same segments in the same order."""

    def __init__(self) -> None:
        self._segments: list[SharedBlock] = []

    def share(self, segment: SharedBlock) -> Tensor:
        """Tensors in this memory stay where they are from now on; returns all of it."""
        self._segments.append(segment)
        return segment.tensor

    def close(self) -> None:
        """Let go of the memory."""
        for segment in self._segments:
            segment.close()
        self._segments.clear()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that is shared."""
        return self._place_of(tensor) is not None

    def pack(self, message: object) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self).dump(message)
        return buffer.getvalue()

    def unpack(self, content: bytes) -> Any:
        """The inverse of `pack`, at the other end. Only for what comes from a process that this run has started."""
        return _Unpickler(io.BytesIO(content), self).load()

    def _place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """The segment's number, and the offset there."""
        first = tensor.data_ptr()
        for number, segment in enumerate(self._segments):
            offset = first - segment.tensor.data_ptr()
            if 0 <= offset < segment.address.num_bytes:
                return number, offset
        return None

    def description_of(self, tensor: Tensor) -> tuple[Any, ...]:
        shape, dtype = tuple(tensor.shape), tensor.dtype
        place = self._place_of(tensor) if tensor.numel() else None
        if place is not None:
            return (*place, shape, tensor.stride(), dtype)
        flat = tensor.detach().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"", shape, dtype

    def described(self, description: tuple[Any, ...]) -> Tensor:
        """The inverse of `description_of`."""
        if len(description) == 3:
            content, shape, dtype = description
            if not content:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)
        number, offset, shape, strides, dtype = description
        num_elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        raw = self._segments[number].tensor[offset : offset + num_elements * dtype.itemsize]
        tensor: Tensor = raw.view(dtype).as_strided(shape, strides)
        return tensor


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, carrier: Carrier) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._carrier = carrier

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return Carrier.described, (self._carrier.description_of(obj),)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, carrier: Carrier) -> None:
        super().__init__(buffer)
        self._carrier = carrier

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._carrier.described if found is Carrier.described else found  # this end's
