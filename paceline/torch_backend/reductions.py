"""torch's reduce operations in terms of Paceline's."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.base import Collective, Finished, ReduceOp, Work
from paceline.division import divide
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
    """Reduce over all ranks, in place; bitwise operations, and those of sparse tensors, block. Raises UsageError or
    TypeError if there is no such reduction."""
    kind = _kind(op)
    if tensor.layout == torch.sparse_coo:
        _all_reduce_sparse(collective, tensor, kind)
        return Finished()
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


def blocks(tensors: Sequence[Tensor], op: Any) -> bool:
    """Whether `all_reduce` of these blocks until every rank has come."""
    return any(op == kind for kind in _BITWISE) or any(tensor.is_sparse for tensor in tensors)


def _all_reduce_sparse(collective: Collective, tensor: Tensor, kind: Any) -> None:
    """Every rank joins all ranks' elements itself, which are few; in rank order, so that all get the same bits."""
    if kind not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise UsageError(f"sparse tensors have SUM and AVG, and no {kind}; convert them with to_dense()")
    mine = tensor.detach().coalesce()
    form = [list(mine.shape), mine.sparse_dim(), str(mine.dtype)]
    collective.require_equal("the sparse tensor's shape, sparse dimensions and dtype", form)
    indices = torch.cat(collective.all_gather(mine.indices()), dim=1)
    values = torch.cat(collective.all_gather(mine.values()))
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    total = torch.sparse_coo_tensor(indices, wide, mine.shape, check_invariants=False).coalesce()
    if kind == dist.ReduceOp.AVG:
        divide(total.values(), collective.size)
    with torch.no_grad():  # a detached sparse tensor would take elements of its own
        tensor.copy_(total.to(mine.dtype))


def _kind(op: Any) -> Any:
    for kind in (*_NAMES, *_BITWISE):
        if op == kind:
            return kind
    name = getattr(op, "op", op)  # the factor of PREMUL_SUM comes in an object that has no name
    raise UsageError(f"the backend has no {name}; it has SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR")
