"""Operations by name: asked for here, done once all ranks have asked."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.horovod.channel import Channel
from paceline.horovod.errors import HorovodInternalError
from paceline.horovod.execution import ADASUM
from paceline.horovod.likeness import Likeness
from paceline.horovod.operation import Operation
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.requests import ALLGATHER, ALLREDUCE, ALLTOALL, BARRIER, BROADCAST, REDUCESCATTER, Member, Request
from paceline.horovod.runtime import GLOBAL, runtime

Average, Sum, Adasum, Min, Max, Product = 0, 1, 2, 3, 4, 5
REDUCTIONS = {Average: "mean", Sum: "sum", Adasum: ADASUM, Min: "min", Max: "max", Product: "product"}
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

Handle = Operation
"""What an operation is called by while it is under way, and until it has been waited for."""
_MOST_TENSORS = 2**16
_About = tuple[str, float, float, int]
"""About a request: the reduction, its two factors, and the root."""
_NOTHING: _About = ("", 1.0, 1.0, 0)


_known: dict[tuple[str, str], tuple[Likeness, tuple[Any, ...], Request]] = {}
"""The last named request of each kind and name, and what it was made of: making one anew takes longer than the rest of
asking."""
_num_known = 0
"""Their tensors."""


@dataclass(eq=False, slots=True)
class _Asked:
    """What a named tensor's last all-reduce was asked for as."""

    op: int | None
    prescale: float
    postscale: float
    dtype: torch.dtype
    shape: torch.Size
    is_cpu: bool
    request: Request


_asked: dict[str | None, _Asked] = {}
"""By name. Scripts ask for a thousand of them a step, so that they go the shortest way."""


def _form(tensors: Sequence[Tensor], about: _About) -> tuple[Any, ...]:
    """All that tells requests of one name apart. Sparse tensors are not contiguous, either."""
    are_contiguous, are_near = all(map(Tensor.is_contiguous, tensors)), [each.is_cpu for each in tensors]
    return ([each.dtype for each in tensors], [each.shape for each in tensors], are_near, are_contiguous, about)


def op_of(op: int | None, average: bool | None) -> int:
    """The reduction that is meant. Raises ValueError if both are given, or it is none."""
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if op not in REDUCTIONS:
            raise ValueError(f"{op!r} is no reduction; use hvd.Average, Sum, Adasum, Min, Max or Product")
        return op
    if average is not None:
        warnings.warn("average has been replaced by op: hvd.Average or hvd.Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average


def all_reduce_async(
    tensor: Tensor,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    is_in_place: bool,
) -> Handle:
    """Ask for an all-reduce of a tensor, which without `op` is its average."""
    asked = _asked.get(name)
    # One by one, as to make a tuple of them and compare it with another takes a fifth of the whole call.
    if (
        asked is None
        or asked.op != op
        or asked.prescale != prescale
        or asked.postscale != postscale
        or asked.dtype is not tensor.dtype
        or asked.shape != tensor.shape
        or asked.is_cpu is not tensor.is_cpu
        or not tensor.is_contiguous()
    ):
        asked = _ask_anew(tensor, name, op, prescale, postscale, process_set)
    tensors = (tensor,)
    operation = Operation(asked.request, tensors, tensors if is_in_place else None)
    operation.channel = channel = runtime().channel(process_set.process_set_id)
    channel.submit(operation)
    return operation


def _ask_anew(
    tensor: Tensor,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> _Asked:
    reduction = op_of(op, None)
    if reduction == Adasum:
        _require_adasum(ALLREDUCE, process_set)
    request = _request(ALLREDUCE, (tensor,), name, process_set, (REDUCTIONS[reduction], prescale, postscale, 0))
    asked = _Asked(op, prescale, postscale, tensor.dtype, tensor.shape, tensor.is_cpu, request)
    if name is not None and reduction != Adasum:  # which is looked at each time
        if len(_asked) >= _MOST_TENSORS:
            _asked.clear()
        _asked[name] = asked
    return asked


def reduce_async(
    kind: str,
    tensors: tuple[Tensor, ...],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    is_group: bool = False,
    is_in_place: bool = False,
) -> Handle:
    """Ask for an all-reduce or a reduce-scatter of a tensor, or of a group, which is one operation."""
    if op == Adasum:
        _require_adasum(kind, process_set)
    request = _request(kind, tensors, name, process_set, (REDUCTIONS[op], prescale, postscale, 0), is_group=is_group)
    return submit(Operation(request, tensors, tensors if is_in_place else None, is_group), process_set)


def gather_async(
    tensors: Sequence[Tensor], *, name: str | None, process_set: ProcessSet, is_group: bool = False
) -> Handle:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("allgather takes tensors of at least one dimension; give it tensor.view(1)")
    request = _request(ALLGATHER, tensors, name, process_set, is_group=is_group)
    return submit(Operation(request, [each.detach() for each in tensors], is_group=is_group), process_set)


def broadcast_into_async(
    tensor: Tensor, output: Tensor, root_rank: int, *, name: str | None, process_set: ProcessSet
) -> Handle:
    ranks = runtime().channel(process_set.process_set_id).ranks
    if root_rank not in ranks:
        raise ValueError(f"root rank {root_rank} does not belong to the process set of ranks {list(ranks)}")
    request = _request(BROADCAST, [tensor], name, process_set, ("", 1.0, 1.0, root_rank))
    return submit(Operation(request, [tensor], [output]), process_set)


def all_to_all_async(
    tensor: Tensor, splits: "Tensor | Sequence[int] | None", *, name: str | None, process_set: ProcessSet
) -> Handle:
    size = len(runtime().channel(process_set.process_set_id).ranks)
    lengths = _splits(tensor, splits, size)
    request = _request(ALLTOALL, [tensor], name, process_set)
    # Who gives no splits is told of none.
    finish = None if splits is not None else _first
    return submit(Operation(request, [tensor], splits=lengths, finish=finish), process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the process set has called."""
    channel = runtime().channel(process_set.process_set_id)
    count = runtime().count(process_set.process_set_id, BARRIER)
    operation = Operation(Request(BARRIER, f"{BARRIER}.noname.{count}", is_lasting=False))
    channel.submit(operation)
    channel.wait(operation)


def join(device: int = -1) -> int:
    """Take part with zeros in what the others all-reduce, until all have joined; returns the rank that came last.

    Args:
        device: where the zeros would lie on GPUs; there is nothing to choose here.
    """
    last = runtime().channel(GLOBAL).join()
    runtime().recount()
    return last


def poll(handle: Handle) -> bool:
    """Whether the operation is over, so that `synchronize` will not block.

    Raises ValueError if it was waited for, or is none.
    """
    channel: Channel | None = getattr(handle, "channel", None)
    if channel is None:
        is_known = isinstance(handle, Operation)
        raise ValueError(f"{handle.request.name!r} has been waited for" if is_known else f"{handle!r} is no handle")
    return channel.poll(handle)


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result: once, None afterwards, and for what is no handle.

    Raises HorovodInternalError if it could not be done.
    """
    try:
        channel = handle.channel
        del handle.channel  # of several threads that wait for it, in one alone
    except AttributeError:
        return None
    try:
        if not handle.is_over or handle.error is not None:
            channel.wait(handle)
        results = _on_device(handle)
    finally:
        if handle.is_over:  # who was interrupted leaves it under way
            handle.tensors = handle.outputs = handle.result = ()  # of a handle that the script keeps
    return [*results] if handle.is_group else results[0]


def submit(operation: Operation, process_set: ProcessSet) -> Handle:
    operation.channel = channel = runtime().channel(process_set.process_set_id)
    channel.submit(operation)
    return operation


def _request(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    about: _About = _NOTHING,
    *,
    is_group: bool = False,
) -> Request:
    """What to tell the others. Raises ValueError for tensors that cannot travel."""
    global _num_known
    if name is None:
        name = f"noname.{runtime().count(process_set.process_set_id, kind)}"
        return _make_request(f"{kind}.{name}", kind, tensors, about, is_group=is_group, is_lasting=False)
    known = _known.get((kind, name))
    if known is not None and known[0].is_of(tensors, about):
        return known[2]
    form = _form(tensors, about)
    if known is not None and known[1] == form:
        return known[2]
    request = _make_request(f"{kind}.{name}", kind, tensors, about, is_group=is_group)
    _num_known += len(tensors)
    if _num_known > _MOST_TENSORS:
        _known.clear()
        _num_known = len(tensors)
    _known[kind, name] = Likeness(tensors, about), form, request
    return request


def _make_request(
    name: str, kind: str, tensors: Sequence[Tensor], about: _About, *, is_group: bool, is_lasting: bool = True
) -> Request:
    names = [f"{name}_{number}of{len(tensors)}" for number, _ in enumerate(tensors, 1)] if is_group else [name]
    return request_of(
        names, tensors, kind=kind, about=about, name=f"grouped_{name}" if is_group else name, is_lasting=is_lasting
    )


def request_of(
    names: Sequence[str],
    tensors: Sequence[Tensor],
    *,
    kind: str,
    about: _About,
    name: str,
    is_lasting: bool = True,
    has_room: bool = False,
) -> Request:
    """The request for tensors that have names of their own. Raises ValueError for those that cannot travel.

    Args:
        about: the reduction, its two factors, and the root.
        name: by which ranks know the whole.
        has_room: whether the tensors, of one dtype and on CPUs, may get memory of their own to be reduced in.
    """
    for tensor in tensors:
        _require_sendable(kind, tensor, about[0])
    members = tuple(
        Member(each, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type)
        for each, tensor in zip(names, tensors, strict=True)
    )
    return Request(kind, name, members, *about, is_lasting, has_room)


def _require_sendable(kind: str, tensor: Tensor, op: str) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(f"{kind} takes dense tensors; use sparse_allreduce_async for sparse ones")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    if tensor.dtype == torch.bool and op == REDUCTIONS[Average]:
        raise ValueError("truth values have no average; use hvd.Max or hvd.Min, or a number's dtype")
    if tensor.dim() == 0 and kind == REDUCESCATTER:
        raise ValueError("reducescatter takes tensors of at least one dimension: a scalar has no rows to scatter")


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
    if process_set.process_set_id != GLOBAL:
        raise NotImplementedError("Adasum takes all ranks; it is not for process sets")
    size = runtime().size
    if size & (size - 1):
        raise NotImplementedError(f"Adasum takes a power of two of ranks, not {size}")


def _first(results: tuple[Tensor, Tensor]) -> Tensor:
    return results[0]


def _on_device(operation: Operation) -> Sequence[Any]:
    """The results, each where its tensor is."""
    if operation.outputs is not None:
        return operation.outputs
    results: Sequence[Any] = operation.result
    if operation.finish is not None:
        results = [*map(operation.finish, results)]
    return [_moved(result, tensor.device) for result, tensor in zip(results, operation.tensors, strict=True)]


def _moved(result: Any, device: torch.device) -> Any:
    return tuple(each.to(device) for each in result) if isinstance(result, tuple) else result.to(device)
