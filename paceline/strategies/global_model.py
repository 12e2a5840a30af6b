"""The global model of workers that differ: the mean of what each has."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.comm.base import Collective


@contextmanager
def averaged(tensors: Iterable[Tensor], collective: Collective) -> Iterator[None]:
    """Floating-point tensors hold their mean over all workers meanwhile, and afterwards what they held. Collective."""
    kept = [tensor for tensor in tensors if tensor.is_floating_point()]
    before = [tensor.detach().clone() for tensor in kept]
    try:
        if collective.size > 1:
            for tensor in kept:
                collective.all_reduce(tensor.detach(), op="mean").wait()
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(kept, before, strict=True):
                tensor.copy_(value)
