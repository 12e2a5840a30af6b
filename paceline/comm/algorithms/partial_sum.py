"""A sum over ranks that grows as their parts arrive."""

from typing import Literal, final

import torch
from torch import Tensor

from paceline.comm.reduction import require_reducible
from paceline.division import divide

SumOrMean = Literal["sum", "mean"]


@final
class PartialSum:
    """What this rank has summed so far of a stretch of the tensor; float16 and bfloat16 are summed in float32."""

    def __init__(self, flat: Tensor) -> None:
        """Begin with this rank's own 1-D `flat`, which `store` overwrites."""
        self._flat = flat
        self._total = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat

    def add(self, part: Tensor, at: int = 0, *, shift: int = 0) -> None:
        """Add another rank's `part`, whose first element belongs at index `at + shift`."""
        self._total[at + shift : at + shift + part.numel()].add_(part)

    def store(self, start: int = 0, stop: int | None = None, *, divisor: int = 1) -> None:
        """Write elements `start` to `stop` of the sum, divided by `divisor`, to the tensor."""
        total = self._total[start:stop]
        if divisor > 1:
            divide(total, divisor)
        if self._total is not self._flat:
            self._flat[start:stop].copy_(total)


def as_flat(tensor: Tensor, op: SumOrMean) -> Tensor:
    """The contiguous `tensor` as one dimension, without its graph. Raises as `require_reducible`, and RuntimeError if
    it is not contiguous."""
    require_reducible(op, tensor.dtype)
    return tensor.detach().view(-1)


def divisor_of(op: SumOrMean, *, size: int) -> int:
    return size if op == "mean" else 1
