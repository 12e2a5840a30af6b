"""The same operations inside a model: what each does to gradients on their way back.

The gradient of a sum over ranks is the sum of the ranks' gradients; an all-gather's is this rank's rows of the reduced
gradient; a broadcast's is on the root, and zero elsewhere.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.horovod import runtime as basics
from paceline.horovod.process_sets import ProcessSet
from paceline.horovod.requests import ALLREDUCE
from paceline.horovod.torch.operations import (
    Average,
    Sum,
    all_to_all_async,
    broadcast_into_async,
    gather_async,
    reduce_async,
    synchronize,
)


class Reduced(torch.autograd.Function):
    """All-reduces or reduce-scatters tensors, as a group if there are several."""

    @staticmethod
    def forward(ctx: Any, kind: str, about: dict[str, Any], is_group: bool, *tensors: Tensor) -> Any:
        ctx.kind, ctx.about, ctx.is_group = kind, about, is_group
        results = synchronize(reduce_async(kind, tensors, is_group=is_group, **about))
        return tuple(results) if is_group else results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back = all_reduced if ctx.kind == ALLREDUCE else scattered_back
        return (None, None, None, *back(gradients, ctx.about, is_group=ctx.is_group))


def all_reduced(gradients: Sequence[Tensor], about: dict[str, Any], *, is_group: bool) -> list[Tensor]:
    about = {**about, "name": None}
    ready = tuple(gradient.contiguous() for gradient in gradients)
    results = synchronize(reduce_async(ALLREDUCE, ready, is_group=is_group, **about))
    return list(results) if is_group else [results]


def scattered_back(gradients: Sequence[Tensor], about: dict[str, Any], *, is_group: bool) -> list[Tensor]:
    """Every rank's rows are what all ranks' inputs have led to."""
    factor = about["prescale"] * about["postscale"]
    process_set: ProcessSet = about["process_set"]
    if about["op"] == Sum:
        # Upstream's convention: the gradient of a sum counts once a rank.
        factor *= len(basics.runtime().channel(process_set.process_set_id).ranks)
    ready = [(gradient * factor).contiguous() for gradient in gradients]
    results = synchronize(gather_async(ready, name=None, process_set=process_set, is_group=is_group))
    return list(results) if is_group else [results]


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, is_group: bool, *tensors: Tensor) -> Any:
        ctx.process_set, ctx.rows = process_set, [len(tensor) for tensor in tensors]
        results = synchronize(gather_async(tensors, name=name, process_set=process_set, is_group=is_group))
        return tuple(results) if is_group else results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        about = {"op": Average, "prescale": 1.0, "postscale": 1.0, "process_set": ctx.process_set}
        is_group = len(gradients) > 1
        reduced = all_reduced(gradients, about, is_group=is_group)
        counts = torch.tensor(ctx.rows, dtype=torch.int64).view(1, -1)
        everyone = synchronize(gather_async([counts], name=None, process_set=ctx.process_set))
        before = everyone[: ctx.process_set.rank()].sum(0).tolist()
        rows = [each.narrow(0, start, count) for each, start, count in zip(reduced, before, ctx.rows, strict=True)]
        return (None, None, None, *rows)


class Broadcasted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root_rank: int, name: str | None, process_set: ProcessSet, tensor: Tensor) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        output = torch.empty_like(tensor)
        return synchronize(broadcast_into_async(tensor, output, root_rank, name=name, process_set=process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        about = {"op": Average, "prescale": 1.0, "postscale": 1.0, "process_set": ctx.process_set}
        (reduced,) = all_reduced(gradients, about, is_group=False)
        is_root = basics.runtime().rank == ctx.root_rank
        return (None, None, None, reduced if is_root else reduced * 0)


class Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, splits: Any, name: str | None, process_set: ProcessSet, tensor: Tensor) -> Any:
        ctx.process_set = process_set
        size = len(basics.runtime().channel(process_set.process_set_id).ranks)
        known = splits if splits is not None else [len(tensor) // size] * size if len(tensor) % size == 0 else None
        found = synchronize(all_to_all_async(tensor, known, name=name, process_set=process_set))
        output, ctx.received = found
        if splits is None:
            return output
        ctx.mark_non_differentiable(ctx.received)
        return output, ctx.received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back, _ = synchronize(
            all_to_all_async(gradients[0].contiguous(), ctx.received, name=None, process_set=ctx.process_set)
        )
        return (None, None, None, back)


def apply(function: Any, *arguments: Any) -> Any:
    """What `torch.autograd.Function.apply` gives, which torch's stubs do not say."""
    return function.apply(*arguments)
