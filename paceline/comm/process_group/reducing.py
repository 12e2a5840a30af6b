"""What travels over torch.distributed for a tensor that is to be reduced, and what becomes of it afterwards."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.base import ReduceOp
from paceline.division import divide

# Half precision travels as what it is accumulated in, and a dtype that gloo cannot reduce as one that it can.
_WIRE_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.bool: torch.uint8,
    **{dtype: dtype for dtype in (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)},
}
_OPERATIONS: dict[ReduceOp, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
# Truth values travel as uint8: their sum means "or" and their product "and".
_BOOL_OPERATIONS = {**_OPERATIONS, "sum": dist.ReduceOp.MAX, "product": dist.ReduceOp.MIN}


def to_wire(tensor: Tensor, op: ReduceOp) -> Tensor:
    """As contiguous memory of a dtype that backends reduce, if possible the same. Raises TypeError if there is none."""
    if tensor.is_complex() and op in ("sum", "mean"):
        return torch.view_as_real(tensor.resolve_conj().contiguous())
    if tensor.dtype not in _WIRE_DTYPES:
        name = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{op} of {name} tensors is not possible over torch.distributed; convert them")
    return tensor.to(_WIRE_DTYPES[tensor.dtype]).contiguous()


def options_for(op: ReduceOp, dtype: torch.dtype) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = (_BOOL_OPERATIONS if dtype == torch.bool else _OPERATIONS)[op]
    return options


def from_wire(wire: Tensor, tensor: Tensor, op: ReduceOp, *, size: int) -> None:
    """Give `tensor` the result of the all-reduce of its `to_wire` over `size` ranks."""
    if op == "mean":
        divide(wire, size)
    if wire.data_ptr() != tensor.data_ptr():
        tensor.copy_(torch.view_as_complex(wire) if tensor.is_complex() else wire)
