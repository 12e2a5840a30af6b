"""Operations by name: asked for here, done once all ranks have asked."""

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.horovod import runtime as basics
from paceline.horovod.channel import Channel, Operation
from paceline.horovod.errors import HorovodInternalError
from paceline.horovod.execution import ADASUM
from paceline.horovod.negotiation import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    REDUCESCATTER,
    Request,
)
from paceline.horovod.process_sets import ProcessSet, global_process_set

Average, Sum, Adasum, Min, Max, Product = 0, 1, 2, 3, 4, 5
_OPS = {Average: "mean", Sum: "sum", Adasum: ADASUM, Min: "min", Max: "max", Product: "product"}
_DTYPES = {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
}

Handle = int
_MOST_REQUESTS = 2**16


class _Asked(NamedTuple):
    """What a handle stands for."""

    operations: list[Operation]
    channel: Channel
    is_group: bool


_under_way: dict[Handle, _Asked] = {}
_handles = itertools.count(1)
_requests_made: dict[tuple[Any, ...], Request] = {}
"""By all that tells named requests apart: making one anew takes longer than the rest of asking."""


def op_of(op: int | None, average: bool | None) -> int:
    """The reduction that is meant. Raises ValueError if both are given, or it is none."""
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if op not in _OPS:
            raise ValueError(f"{op!r} is no reduction; use hvd.Average, Sum, Adasum, Min, Max or Product")
        return op
    if average is not None:
        warnings.warn("average has been replaced by op: hvd.Average or hvd.Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average


def reduce_async(
    kind: str,
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor | None],
    *,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    is_group: bool = False,
) -> Handle:
    """Ask for an all-reduce or a reduce-scatter of each tensor; of a group, all or none are done."""
    if op == Adasum:
        _require_adasum(kind, process_set)
    about = (_OPS[op], prescale, postscale, 0)
    if is_group or name is None:
        requests = _requests(kind, tensors, name, process_set, about, is_group=is_group)
        made = [Operation(each, _detached(tensor), output)
                for each, tensor, output in zip(requests, tensors, outputs, strict=True)]  # fmt: skip
        return _submit(made, process_set, is_group=is_group)
    (tensor,), (output,) = tensors, outputs
    # What scripts ask for a thousand times a step goes the shortest way: 1.5 us less than by lists.
    request = _named_request(kind, name, tensor, about, 1, 1, False)
    return _submit([Operation(request, _detached(tensor), output)], process_set)


def reduce_all_async(
    names: Sequence[str],
    tensors: Sequence[Tensor],
    *,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Handle:
    """Ask for all-reduces in place, each by itself, for which one asking is enough; `synchronize` gives all of them."""
    about = (_OPS[op], prescale, postscale, 0)
    made = [
        Operation(_named_request(ALLREDUCE, name, tensor, about, 1, 1, False), _detached(tensor), tensor)
        for name, tensor in zip(names, tensors, strict=True)
    ]
    return _submit(made, process_set, is_group=True)


def _detached(tensor: Tensor) -> Tensor:
    """Operations run without gradients, so that only what autograd would keep alive has to be detached."""
    return tensor.detach() if tensor.requires_grad else tensor


def gather_async(
    tensors: Sequence[Tensor], *, name: str | None, process_set: ProcessSet, is_group: bool = False
) -> Handle:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("allgather takes tensors of at least one dimension; give it tensor.view(1)")
    requests = _requests(ALLGATHER, tensors, name, process_set, is_group=is_group)
    made = [Operation(each, tensor.detach()) for each, tensor in zip(requests, tensors, strict=True)]
    return _submit(made, process_set, is_group=is_group)


def broadcast_into_async(
    tensor: Tensor, output: Tensor, root_rank: int, *, name: str | None, process_set: ProcessSet
) -> Handle:
    ranks = basics.runtime().channel(process_set.process_set_id).ranks
    if root_rank not in ranks:
        raise ValueError(f"root rank {root_rank} does not belong to the process set of ranks {list(ranks)}")
    (asked,) = _requests(BROADCAST, [tensor], name, process_set, ("", 1.0, 1.0, root_rank))
    return _submit([Operation(asked, tensor.detach(), output)], process_set)


def all_to_all_async(
    tensor: Tensor, splits: "Tensor | Sequence[int] | None", *, name: str | None, process_set: ProcessSet
) -> Handle:
    size = len(basics.runtime().channel(process_set.process_set_id).ranks)
    lengths = _splits(tensor, splits, size)
    (asked,) = _requests(ALLTOALL, [tensor], name, process_set)
    # Who gives no splits is told of none.
    finish = None if splits is not None else _first
    return _submit([Operation(asked, tensor.detach(), splits=lengths, finish=finish)], process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the process set has called."""
    runtime = basics.runtime()
    channel = runtime.channel(process_set.process_set_id)
    count = runtime.count(process_set.process_set_id, BARRIER)
    operation = Operation(Request(BARRIER, f"{BARRIER}.noname.{count}", is_lasting=False))
    channel.submit([operation])
    channel.wait(operation)


def join(device: int = -1) -> int:
    """Take part with zeros in what the others all-reduce, until all have joined; returns the rank that came last.

    Args:
        device: where the zeros would lie on GPUs; there is nothing to choose here.
    """
    runtime = basics.runtime()
    last = runtime.channel(basics.GLOBAL).join()
    runtime.recount()
    return last


def poll(handle: Handle) -> bool:
    """Whether the operation is over, so that `synchronize` will not block."""
    if handle not in _under_way:
        raise ValueError(f"there is no operation with the handle {handle}; it may have been waited for")
    return all(operation.is_over for operation in _under_way[handle].operations)


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result. Raises HorovodInternalError if it could not be done."""
    asked = _under_way.pop(handle, None)
    if asked is None:
        return None
    for operation in asked.operations:
        if not operation.is_over or operation.error is not None:
            asked.channel.wait(operation)
    if not asked.is_group:
        return _on_device(asked.operations[0])
    return [_on_device(operation) for operation in asked.operations]


def _requests(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    about: tuple[str, float, float, int] = ("", 1.0, 1.0, 0),
    *,
    is_group: bool = False,
) -> list[Request]:
    """What to tell the others. Raises ValueError for tensors that cannot travel.

    Args:
        about: the reduction, its two factors, and the root.
    """
    count = len(tensors)
    numbered = enumerate(tensors, 1)
    if name is None:
        base = f"{kind}.noname.{basics.runtime().count(process_set.process_set_id, kind)}"
        return [_request(kind, base, each, about, number, count, is_group) for number, each in numbered]
    return [_named_request(kind, name, each, about, number, count, is_group) for number, each in numbered]


def _named_request(
    kind: str,
    name: str,
    tensor: Tensor,
    about: tuple[str, float, float, int],
    number: int,
    count: int,
    is_group: bool,
) -> Request:
    key = (kind, name, tensor.dtype, tensor.shape, tensor.layout, tensor.device, about, number, count, is_group)
    request = _requests_made.get(key)
    if request is None or not tensor.is_contiguous():
        if len(_requests_made) >= _MOST_REQUESTS:
            _requests_made.clear()
        request = _request(kind, f"{kind}.{name}", tensor, about, number, count, is_group, is_lasting=True)
        _requests_made[key] = request
    return request


def _request(
    kind: str,
    base: str,
    tensor: Tensor,
    about: tuple[str, float, float, int],
    number: int,
    count: int,
    is_group: bool,
    *,
    is_lasting: bool = False,
) -> Request:
    op, prescale, postscale, root = about
    if tensor.layout is not torch.strided:
        raise ValueError(f"{kind} takes dense tensors; use sparse_allreduce_async for sparse ones")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    if tensor.dtype == torch.bool and op == _OPS[Average]:
        raise ValueError("truth values have no average; use hvd.Max or hvd.Min, or a number's dtype")
    if tensor.dim() == 0 and kind == REDUCESCATTER:
        raise ValueError("reducescatter takes tensors of at least one dimension: a scalar has no rows to scatter")
    return Request(
        kind,
        f"{base}_{number}of{count}" if is_group else base,
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        op,
        prescale,
        postscale,
        root,
        tensor.device.type,
        base if is_group else "",
        count if is_group else 1,
        is_lasting,
    )


def _submit(operations: list[Operation], process_set: ProcessSet, *, is_group: bool = False) -> Handle:
    channel = basics.runtime().channel(process_set.process_set_id)
    channel.submit(operations)
    handle = next(_handles)
    _under_way[handle] = _Asked(operations, channel, is_group)
    return handle


def _splits(tensor: Tensor, splits: Any, size: int) -> tuple[int, ...]:
    """Rows for each rank. Raises ValueError if they do not fit the tensor."""
    if tensor.dim() == 0:
        raise ValueError("alltoall takes tensors of at least one dimension")
    if splits is None or len(splits) == 0:
        if len(tensor) % size:
            raise ValueError(f"alltoall divides rows evenly among {size} ranks without splits; there are {len(tensor)}")
        return (len(tensor) // size,) * size
    lengths = torch.as_tensor(splits)
    if lengths.is_floating_point() or lengths.dim() != 1:
        raise ValueError("alltoall's splits are whole numbers, one a rank")
    if len(lengths) != size or int(lengths.min()) < 0 or int(lengths.sum()) != len(tensor):
        raise ValueError(
            f"alltoall's splits {lengths.tolist()} must be {size} numbers that add up to the {len(tensor)} rows to send"
        )
    return tuple(int(length) for length in lengths)


def _require_adasum(kind: str, process_set: ProcessSet) -> None:
    if kind == REDUCESCATTER:
        raise HorovodInternalError("reducescatter has no Adasum; use allreduce")
    # What Horovod itself raises here, so that scripts that catch it go on.
    if process_set.process_set_id != basics.GLOBAL:
        raise NotImplementedError("Adasum takes all ranks; it is not for process sets")
    size = basics.runtime().size
    if size & (size - 1):
        raise NotImplementedError(f"Adasum takes a power of two of ranks, not {size}")


def _first(results: tuple[Tensor, Tensor]) -> Tensor:
    return results[0]


def _on_device(operation: Operation) -> Any:
    """The result where the tensor is."""
    result = operation.result if operation.finish is None else operation.finish(operation.result)
    tensor = operation.tensor
    if operation.output is not None or tensor is None or tensor.is_cpu:
        return result
    move: Callable[[Any], Any] = lambda each: each.to(tensor.device)  # noqa: E731
    return tuple(map(move, result)) if isinstance(result, tuple) else move(result)
