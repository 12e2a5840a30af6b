"""Plain Python data and tensors as tensors of bytes, which collectives move, and back."""

import contextlib
import io
import math
import pickle
from typing import Any

import numpy
import torch
from torch import Tensor

_ZIP_MAGIC = b"PK"  # of torch's format; a pickle begins with another byte
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def encode_object(value: Any) -> Tensor:
    """Plain data and tensors as a uint8 tensor: as a pickle that names nothing but how a tensor is made of its bytes,
    or in torch's weights-only format.

    The first takes 10 microseconds there and back, and 20 more for each tensor, the second 400: it is for all but
    contiguous tensors of common numbers in memory of the host that each has for itself. Raises TypeError if the value
    would need free unpickling.
    """
    with contextlib.suppress(pickle.PicklingError):
        plain = io.BytesIO()
        _PlainPickler(plain, protocol=4).dump(value)
        return torch.frombuffer(bytearray(plain.getbuffer()), dtype=torch.uint8)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    raw = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
    try:
        decode_object(raw)
    except pickle.UnpicklingError as error:
        raise TypeError(f"only plain data and tensors can be exchanged, not {type(value).__name__}: {error}") from None
    return raw


def decode_object(raw: Tensor) -> Any:
    """The inverse of `encode_object`; refuses everything but plain data and tensors."""
    content = raw.numpy().tobytes()
    if content.startswith(_ZIP_MAGIC):
        return torch.load(io.BytesIO(content), weights_only=True)
    return _PlainUnpickler(io.BytesIO(content)).load()


class _PlainPickler(pickle.Pickler):
    """Writes Python's own plain types at the speed of C, and asks about everything else."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._memory: set[int] = set()  # of tensors that have been written

    def reducer_override(self, value: Any) -> Any:
        if value is _tensor:
            return NotImplemented  # by its name
        if type(value) is Tensor and _is_common(value) and value.untyped_storage().data_ptr() not in self._memory:
            self._memory |= {value.untyped_storage().data_ptr()} - {0}  # 0: an empty tensor has no memory
            return _tensor, (str(value.dtype), tuple(value.shape), _bytes_of(value).tobytes())
        raise pickle.PicklingError(f"{type(value).__name__} is no plain data")


class _PlainUnpickler(pickle.Unpickler):
    """Reads what the other one writes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, "_tensor"):
            return _Making()
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def _is_common(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and str(tensor.dtype) in _DTYPES
    if not is_dense or tensor.requires_grad or tensor.is_neg() or vars(tensor):
        return False
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _tensor(dtype: str, shape: tuple[int, ...], content: bytes) -> Tensor:
    if dtype not in _DTYPES or min(shape, default=0) < 0:
        raise pickle.UnpicklingError(f"there is no {dtype} of shape {shape}")
    if len(content) != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise pickle.UnpicklingError(f"{len(content)} bytes make no {dtype} of shape {shape}")
    made = torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")
    _bytes_of(made)[:] = numpy.frombuffer(content, dtype=numpy.uint8)
    return made


class _Making:
    """The unpickler hands this out in place of `_tensor`: a pickle can set no attribute of it."""

    __slots__ = ()

    def __call__(self, dtype: str, shape: tuple[int, ...], content: bytes) -> Tensor:
        return _tensor(dtype, shape, content)


def _bytes_of(tensor: Tensor) -> Any:
    """In the tensor's own memory."""
    return tensor.view(-1).view(torch.uint8).numpy()
