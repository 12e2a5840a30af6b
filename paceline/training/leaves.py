"""The leaves of a tree, whichever framework made them: into a piece of a flat tensor, and out of it in their own kind.

A framework is asked only if the script has loaded it: nothing here imports JAX or TensorFlow.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError


@dataclass(frozen=True)
class Leaf(ABC):
    """A value of a tree, and what all ranks must agree on about it."""

    value: Any
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device = torch.device("cpu")

    @property
    def form(self) -> str:
        """As `float32[3, 2]`."""
        where = "" if self.device.type == "cpu" else f" on {self.device.type}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{where}"

    @abstractmethod
    def fill(self, piece: Tensor) -> None:
        """Copy the value into `piece`, contiguous, of this dtype and shape."""

    @abstractmethod
    def like(self, piece: Tensor) -> Any:
        """What `piece` holds, in this leaf's kind: over the same memory where the kind allows it."""


def leaf_of(value: Any) -> Leaf:
    """Raises UsageError, which says of what kind the value is, for one that is no leaf."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise UsageError(f"a {value.layout} tensor on {value.device} is not dense numbers; give value.to_dense()")
        return _Torch(value, value.dtype, value.shape, value.device)
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError("a masked array is not dense numbers: give value.filled(0) and the mask, as numbers")
    if isinstance(value, (np.ndarray, np.generic)):
        return _Numpy(value, _torch_dtype(value.dtype.name), torch.Size(value.shape))
    if type(value) in _SCALARS:
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise UsageError(f"{value} does not fit 64 bits: give a float")
        return _Scalar(value, _SCALARS[type(value)], torch.Size())
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.Array):
        if isinstance(value, jax.core.Tracer):
            raise UsageError("it is being traced by JAX: exchange arrays outside jit, grad and vmap")
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            raise UsageError("a typed key of JAX is not numbers: give jax.random.key_data(key)")
        return _bridged(_Jax, value, _from_jax)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.is_tensor(value):
        if not (hasattr(value, "numpy") and type(value).__name__ == "EagerTensor"):
            raise UsageError(f"a TensorFlow {type(value).__name__} is no eager dense tensor: give its value, eagerly")
        return _bridged(_TensorFlow, value, _from_tensorflow)
    raise UsageError(
        f"{type(value).__name__} can be no leaf: give tensors, arrays and numbers, in dict, list, tuple or namedtuple"
    )


_SCALARS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


@final
class _Torch(Leaf):
    def fill(self, piece: Tensor) -> None:
        piece.copy_(self.value.detach())

    def like(self, piece: Tensor) -> Tensor:
        return piece


@final
class _Numpy(Leaf):
    def fill(self, piece: Tensor) -> None:
        self._array(piece)[...] = self.value

    def like(self, piece: Tensor) -> Any:
        array = self._array(piece)
        return array[()] if isinstance(self.value, np.generic) else array

    def _array(self, piece: Tensor) -> Any:
        # By bytes: torch knows no bfloat16 of numpy, and numpy none of torch. The byte order is this machine's.
        return piece.reshape(-1).view(torch.uint8).numpy().view(self.value.dtype.newbyteorder("=")).reshape(self.shape)


@final
class _Scalar(Leaf):
    def fill(self, piece: Tensor) -> None:
        piece.fill_(self.value)

    def like(self, piece: Tensor) -> Any:
        return piece.item()


@dataclass(frozen=True)
class _Seen(Leaf):
    """An array of another framework, whose memory torch sees."""

    seen: Tensor = torch.empty(0)

    def fill(self, piece: Tensor) -> None:
        piece.copy_(self.seen)


@final
class _Jax(_Seen):
    def like(self, piece: Tensor) -> Any:
        jax = sys.modules["jax"]
        if piece.numel() == 0 or piece.dtype == torch.bool:  # which JAX takes by no view
            array = jax.numpy.asarray(piece.cpu().numpy())
        else:
            array = jax.numpy.from_dlpack(piece)
        return jax.device_put(array, self.value.sharding)


@final
class _TensorFlow(_Seen):
    def like(self, piece: Tensor) -> Any:
        tensorflow = sys.modules["tensorflow"]
        if piece.numel() == 0 or piece.dtype == torch.bool:
            return tensorflow.constant(piece.numpy(), shape=self.shape)
        return tensorflow.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(piece))


def _bridged(kind: Callable[[Any, torch.dtype, torch.Size, torch.device, Tensor], Leaf], value: Any, see: Any) -> Leaf:
    try:
        seen = see(value)
    except Exception as error:  # of either framework's kinds
        raise UsageError(f"torch cannot see the memory of {value.dtype}{list(value.shape)}: {error}") from error
    return kind(value, seen.dtype, seen.shape, seen.device, seen)


def _from_jax(value: Any) -> Tensor:
    return torch.from_dlpack(value.block_until_ready())


def _from_tensorflow(value: Any) -> Tensor:
    if "GPU" in value.device:
        raise UsageError("only TensorFlow tensors on the CPU can be exchanged: copy it with tf.device('CPU')")
    _torch_dtype(value.dtype.name)  # TensorFlow ends the process where it is asked for the memory of strings
    return torch.from_dlpack(sys.modules["tensorflow"].experimental.dlpack.to_dlpack(value))


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"arrays of {name} cannot be exchanged: convert it to numbers that torch has")
    return dtype
