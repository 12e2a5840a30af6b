"""The collective operations, as Horovod's scripts call them.

An operation is matched with the other ranks' by its name; without one, by the order of the calls. What ends in `_async`
returns a handle for `poll` and `synchronize`; what ends in `_` changes its tensor in place. The default reduction is
the average. Tensors are dense and contiguous; of one name they have one dtype and shape on all ranks, but for the first
dimension in `allgather` and `alltoall`.

Every operation raises HorovodInternalError where ranks do not agree, or one is gone, and ValueError for a tensor that
cannot travel, or a name that is under way.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.requests import ALLREDUCE, REDUCESCATTER
from paceline.horovod.torch.compression import Compression, Compressor
from paceline.horovod.torch.gradients import Broadcasted, Exchanged, Gathered, Reduced, apply
from paceline.horovod.torch.operations import (
    Average,
    Handle,
    all_reduce_async,
    all_to_all_async,
    broadcast_into_async,
    gather_async,
    op_of,
    reduce_async,
    synchronize,
)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce a tensor over all ranks, into a new one."""
    op = op if average is None else op_of(op, average)
    return all_reduce_async(tensor, name, op, prescale_factor, postscale_factor, process_set, is_in_place=False)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """A tensor reduced over all ranks; gradients flow back through it."""
    about = _about(name, op_of(op, average), prescale_factor, postscale_factor, process_set)
    small, context = compression.compress(tensor)
    reduced: Tensor = compression.decompress(apply(Reduced, ALLREDUCE, about, False, small), context)
    return reduced


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce a tensor over all ranks, in place."""
    op = op if average is None else op_of(op, average)
    return all_reduce_async(tensor, name, op, prescale_factor, postscale_factor, process_set, is_in_place=True)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks, in place."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: Tensor = synchronize(handle)
    return reduced


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `allreduce_async`, of tensors that are reduced together once all ranks have asked for all of them."""
    return reduce_async(
        ALLREDUCE,
        tuple(tensors),
        name,
        op_of(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
        is_group=True,
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As `allreduce`, of tensors that are reduced together."""
    about = _about(name, op_of(op, average), prescale_factor, postscale_factor, process_set)
    return _compressed(compression, tensors, lambda small: apply(Reduced, ALLREDUCE, about, True, *small))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `allreduce_async_`, of tensors that are reduced together."""
    return reduce_async(
        ALLREDUCE,
        tuple(tensors),
        name,
        op_of(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
        is_group=True,
        is_in_place=True,
    )


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As `allreduce_`, of tensors that are reduced together."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: list[Tensor] = synchronize(handle)
    return reduced


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to sum or average a sparse tensor over all ranks. Call what it returns for the result, a sparse tensor
    that holds every rank's entries."""
    indices = gather_async([tensor._indices().t().contiguous()], name=f"{name}.indices", process_set=process_set)
    values = gather_async([tensor._values().contiguous()], name=f"{name}.values", process_set=process_set)

    def result() -> Tensor:
        size = process_set.size()
        assert size is not None
        summed = synchronize(values)
        joined = summed / size if op == Average else summed
        return torch.sparse_coo_tensor(synchronize(indices).t(), joined, tensor.size())

    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start to put all ranks' tensors one behind the other."""
    return gather_async([tensor], name=name, process_set=process_set)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' tensors one behind the other, in rank order; gradients flow back through it."""
    gathered: Tensor = apply(Gathered, name, process_set, False, tensor)
    return gathered


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As `allgather_async`, of tensors that are gathered together."""
    return gather_async(tensors, name=name, process_set=process_set, is_group=True)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """As `allgather`, of tensors that are gathered together."""
    return list(apply(Gathered, name, process_set, True, *tensors))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to bring the root's tensor to all ranks, into a new one."""
    output = torch.empty_like(tensor)
    return broadcast_into_async(tensor, output, root_rank, name=name, process_set=process_set)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor; gradients flow back through it."""
    result: Tensor = apply(Broadcasted, root_rank, name, process_set, tensor)
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to overwrite a tensor with the root's."""
    return broadcast_into_async(tensor, tensor, root_rank, name=name, process_set=process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite a tensor with the root's."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall_async(
    tensor: Tensor,
    splits: "Tensor | Sequence[int] | None" = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to send `splits[i]` rows to the i-th rank; without splits, all ranks get as many."""
    return all_to_all_async(tensor, splits, name=name, process_set=process_set)


def alltoall(
    tensor: Tensor,
    splits: "Tensor | Sequence[int] | None" = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """What all ranks have sent here, in rank order; with splits, also how many rows came from each."""
    return apply(Exchanged, splits, name, process_set, tensor)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start to reduce a tensor over all ranks, of which this one gets its share of rows."""
    return reduce_async(REDUCESCATTER, (tensor,), name, op, prescale_factor, postscale_factor, process_set)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of a tensor reduced over all ranks; gradients flow back through it."""
    about = _about(name, op, prescale_factor, postscale_factor, process_set)
    small, context = compression.compress(tensor)
    reduced: Tensor = compression.decompress(apply(Reduced, REDUCESCATTER, about, False, small), context)
    return reduced


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As `reducescatter_async`, of tensors that are reduced together."""
    return reduce_async(
        REDUCESCATTER, tuple(tensors), name, op, prescale_factor, postscale_factor, process_set, is_group=True
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """As `reducescatter`, of tensors that are reduced together."""
    about = _about(name, op, prescale_factor, postscale_factor, process_set)
    return _compressed(compression, tensors, lambda small: apply(Reduced, REDUCESCATTER, about, True, *small))


def _about(name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet) -> dict[str, Any]:
    return {"name": name, "op": op, "prescale": prescale, "postscale": postscale, "process_set": process_set}


def _compressed(
    compression: type[Compressor], tensors: Sequence[Tensor], run: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> list[Tensor]:
    small, contexts = zip(*map(compression.compress, tensors), strict=True)
    return [compression.decompress(each, context) for each, context in zip(run(small), contexts, strict=True)]
