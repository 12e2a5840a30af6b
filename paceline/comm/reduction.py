"""Element-wise reduction of one tensor a rank, in rank order, so that every rank gets the same bits."""

import functools
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from paceline.comm.base import REDUCE_OPS, ReduceOp
from paceline.division import divide
from paceline.errors import unknown

_ACCUMULATION_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What a dtype is accumulated in, where that is not the dtype itself."""

_COMBINE: dict[ReduceOp, str] = {  # torch's names and numpy's
    "sum": "add",
    "mean": "add",
    "min": "minimum",
    "max": "maximum",
    "product": "multiply",
}


@final
class Reduction:
    """Reduces tensors of one dtype with one operation.

    float16 and bfloat16 are accumulated in float32; the mean of integers truncates towards zero. Of bool, sum and max
    are "or", product and min are "and", and there is no mean.
    """

    def __init__(self, op: ReduceOp, dtype: torch.dtype) -> None:
        self._combine: Callable[..., Any] = getattr(torch, _COMBINE[op])
        self._is_mean = op == "mean"
        self._accumulation_dtype = _ACCUMULATION_DTYPES.get(dtype)
        self._scratch = (torch.empty(0), torch.empty(0))

    def __call__(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Write the reduction of `parts` to `out`; all of one shape, 1-D. `out` may be the first part itself."""
        if self._accumulation_dtype is not None and len(parts) > 1:
            self._reduce_widened(parts, out)
        else:
            self._reduce(parts, out)

    def _reduce(self, parts: Sequence[Tensor], out: Tensor) -> None:
        if len(parts) == 1:
            out.copy_(parts[0])
            return
        self._combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            self._combine(out, part, out=out)
        if self._is_mean:
            divide(out, len(parts))

    def _reduce_widened(self, parts: Sequence[Tensor], out: Tensor) -> None:
        num_elements = out.numel()
        if self._scratch[0].numel() < num_elements:
            with torch.inference_mode(False):  # else nobody outside of it could write there later
                one, other = torch.empty(2, num_elements, dtype=self._accumulation_dtype, device=out.device)
            self._scratch = (one, other)
        total, addend = self._scratch[0][:num_elements], self._scratch[1][:num_elements]
        total.copy_(parts[0])
        for part in parts[1:]:
            self._combine(total, addend.copy_(part), out=total)
        if self._is_mean:
            divide(total, len(parts))
        out.copy_(total)


@final
class ArrayReduction:
    """As `Reduction`, over small numpy arrays of real numbers that need no widening."""

    def __init__(self, op: ReduceOp) -> None:
        self._combine = getattr(np, _COMBINE[op])
        self._is_mean = op == "mean"
        self._size: Any = None

    def __call__(self, parts: Sequence[Any], out: Any) -> None:
        if len(parts) == 1:
            out[:] = parts[0]
            return
        self._combine(parts[0], parts[1], out)
        for part in parts[2:]:
            self._combine(out, part, out)
        if self._is_mean:
            if self._size is None or self._size != len(parts):
                self._size = np.array(len(parts), out.dtype)  # which numpy is spared to make of a number, 10 us a step
            np.divide(out, self._size, out)


def quietly() -> Callable[..., Any]:
    """Calls what it is given with its arguments, so that numpy says nothing of what is infinite, no number or too
    small, as torch does not, whatever the script has told numpy to do. One call at a time."""
    if int(np.__version__.split(".")[0]) >= 2:  # has this in the context, which is entered without a call in Python
        context = Context()
        context.run(np.seterr, all="ignore")
        return context.run

    def call(function: Callable[..., Any], *given: object) -> Any:
        with np.errstate(all="ignore"):
            return function(*given)

    return call


@functools.cache
def require_reducible(op: ReduceOp, dtype: torch.dtype) -> None:
    """Raises UsageError if there is no such operation, TypeError if torch has none for the dtype on the CPU."""
    if op not in REDUCE_OPS:
        raise unknown("reduce operation", str(op), REDUCE_OPS)
    if not _is_possible(op, dtype):
        name = str(dtype).removeprefix("torch.")
        raise TypeError(f"{op} of {name} tensors is not possible; convert them to a dtype that has it")


def _is_possible(op: ReduceOp, dtype: torch.dtype) -> bool:
    if op == "mean" and dtype == torch.bool:
        return False  # torch divides truth values, but into something else
    sample = torch.zeros(1, dtype=dtype)
    try:
        Reduction(op, dtype)([sample, sample], torch.zeros(1, dtype=dtype))
    except RuntimeError:  # also where torch has no kernel for it
        return False
    return True
