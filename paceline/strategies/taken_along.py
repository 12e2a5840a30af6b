"""What a script has taken of its parameters before they move, such as `parameter.data`: it moves with them."""

import gc
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.errors import UsageError
from paceline.layout import TensorSpec


@final
class TakenAlong:
    """Remembers where parameters lie, without holding their memory.

    Without this a kept tensor would show what the parameter was at `prepare`, and a change of it would be lost.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], specs: Sequence[TensorSpec]) -> None:
        self._old = [_Old(parameter, spec.name) for parameter, spec in zip(parameters, specs, strict=True)]

    def follow(self) -> None:
        """The parameters have moved. Have the script's other tensors of their old memory be views of the new one.

        Raises:
            UsageError: one of them holds more than a parameter, and so would lie in two places.
        """
        if not any(old.is_held for old in self._old):
            return
        gc.collect()  # what nobody can reach any more is not to be refused
        held = [old for old in self._old if old.is_held]
        for tensor in _alive() if held else ():
            start, stop = extent(tensor)
            for old in held:
                if start < old.stop and old.start < stop:
                    old.take_along(tensor)
                    break


@final
class _Old:
    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        self._parameter, self._name = parameter, name
        self._form = parameter.shape, parameter.stride()
        self._is_contiguous = parameter.is_contiguous()
        self._storage = StorageWeakRef(parameter.untyped_storage())
        self.start, self.stop = extent(parameter)

    @property
    def is_held(self) -> bool:
        """Whether somebody else has a tensor there, be it a graph of autograd's."""
        return not self._storage.expired()

    def take_along(self, tensor: Tensor) -> None:
        (start, stop), now = extent(tensor), self._parameter.data
        is_part = self.start <= start and stop <= self.stop and tensor.dtype == now.dtype
        tensor.__dict__["_paceline_old"] = tensor.untyped_storage()  # which arrays of numpy's, that hold it, still show
        if is_part and (tensor.shape, tensor.stride()) == self._form:
            tensor.data = now
        elif is_part and self._is_contiguous:
            offset = now.storage_offset() + (start - self.start) // now.itemsize
            tensor.data = now.as_strided(tensor.shape, tensor.stride(), offset)
        else:
            raise UsageError(
                f"the script holds a tensor of shape {list(tensor.shape)} and {tensor.dtype}, made before prepare, "
                f"which has the memory of parameter {self._name!r} and more, or in another form; servers and "
                "neighbours read parameters from memory of their own, where it would not follow: make it after "
                "prepare, or use all-reduce"
            )


def extent(tensor: Tensor) -> tuple[int, int]:
    """Where its memory begins, and where it ends."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _alive() -> Iterator[Tensor]:
    """Every plain tensor of the process that Python knows of."""
    found = (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter))
    return (tensor for tensor in found if tensor.layout is torch.strided and not tensor.is_meta)
