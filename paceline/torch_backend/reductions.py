"""torch's reduce operations in terms of Paceline's."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.base import Collective, Finished, ReduceOp, Work
from paceline.errors import UsageError

_NAMES: dict[Any, ReduceOp] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}
_BITWISE: dict[Any, Any] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def all_reduce(collective: Collective, tensor: Tensor, op: Any) -> Work:
    """Reduce over all ranks, in place; bitwise operations block. Raises UsageError or TypeError if there is no such
    reduction."""
    kind = _kind(op)
    if kind in _BITWISE:
        tensor.copy_(functools.reduce(_BITWISE[kind], collective.all_gather(tensor)))
        return Finished()
    return collective.all_reduce(tensor, op=_NAMES[kind])


def reduce_scatter(collective: Collective, parts: list[Tensor], op: Any) -> Tensor:
    """Reduce the i-th parts of all ranks for rank i; raises as `all_reduce`."""
    kind = _kind(op)
    if kind in _BITWISE:
        return functools.reduce(_BITWISE[kind], collective.all_to_all(parts))
    return collective.reduce_scatter(parts, op=_NAMES[kind])


def is_bitwise(op: Any) -> bool:
    return any(op == kind for kind in _BITWISE)


def _kind(op: Any) -> Any:
    for kind in (*_NAMES, *_BITWISE):
        if op == kind:
            return kind
    name = getattr(op, "op", op)  # the factor of PREMUL_SUM comes in an object that has no name
    raise UsageError(f"the backend has no {name}; it has SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR")
