"""The global model of workers that differ: the mean of what each has."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.arrays import as_array
from paceline.comm.base import Collective


@contextmanager
def averaged(tensors: Iterable[Tensor], collective: Collective) -> Iterator[None]:
    """Tensors of real or complex numbers hold their mean over all workers meanwhile, and afterwards what they held.

    Those that are the same on all workers stay as they are, to the last bit: a mask of the smallest number has no
    sum. So do those whose workers' shapes differ, which have no mean. Collective.
    """
    numbers = _numbers(tensors)
    differ = _differ(numbers, collective)
    # An evaluation may change buffers, as batch norm does. Parameters that stay may be a whole frozen model.
    changing = [tensor for tensor, differs in zip(numbers, differ, strict=True) if differs or not _is_parameter(tensor)]
    before = [tensor.detach().clone() for tensor in changing]
    try:
        for tensor, differs in zip(numbers, differ, strict=True):
            if differs:
                _average(tensor.detach(), collective)
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(changing, before, strict=True):
                tensor.copy_(value)


def average(tensors: Iterable[Tensor], collective: Collective) -> None:
    """The same, for good. Collective."""
    numbers = _numbers(tensors)
    for tensor, differs in zip(numbers, _differ(numbers, collective), strict=True):
        if differs:
            _average(tensor.detach(), collective)


def _numbers(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _differ(tensors: list[Tensor], collective: Collective) -> list[bool]:
    """Which of the tensors have one shape on all workers, and other values."""
    if collective.size == 1 or not tensors:
        return [False] * len(tensors)
    everyone = collective.all_gather_object([(tuple(tensor.shape), _digest(tensor)) for tensor in tensors])
    return [len({shape for shape, _ in same}) == 1 < len({*same}) for same in zip(*everyone, strict=True)]


def _digest(tensor: Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(as_array(raw), digest_size=16).digest()


def _average(tensor: Tensor, collective: Collective) -> None:
    """Average in double precision, and divide before adding up, so that no sum overflows."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    share = real.double().div_(collective.size)
    collective.all_reduce(share, op="sum").wait()
    real.copy_(share)
