"""What is done once all ranks have asked: small all-reduces together, through one buffer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from paceline.comm.base import Collective, ReduceOp, Work
from paceline.horovod.adasum import adasum
from paceline.horovod.negotiation import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    REDUCESCATTER,
    Due,
    Ready,
    Request,
)
from paceline.horovod.timeline import Timeline

if TYPE_CHECKING:
    from paceline.horovod.channel import Operation

ADASUM = "adasum"
_MOST_PLANS = 64
_Key = tuple[str, str, tuple[tuple[int, ...], ...]]


@final
@dataclass(eq=False)
class Batch:
    """What is done at a time."""

    ready: Sequence[Ready]
    names: tuple[str, ...] = field(init=False)
    plan_key: _Key = field(init=False)

    def __post_init__(self) -> None:
        first = self.ready[0].request
        self.names = tuple(each.request.name for each in self.ready)
        self.plan_key = (first.dtype, first.op, tuple(each.request.shape for each in self.ready))


@dataclass
class _Plan:
    """All-reduces that are done together, again and again."""

    views: list[Tensor]
    start: Callable[[], Work]


@final
class Executor:
    """Runs what is due, in the same order on every rank of a process set.

    Args:
        fusion_bytes: the most that all-reduces of one kind are put together to.
        ranks: the set's ranks, as the script counts them.
    """

    def __init__(self, collective: Collective, *, fusion_bytes: int, ranks: Sequence[int], timeline: Timeline) -> None:
        self._collective, self._fusion_bytes, self._ranks = collective, fusion_bytes, tuple(ranks)
        self._timeline = timeline
        self._buffer: Tensor | None = None
        self._plans: dict[_Key, _Plan] = {}
        self._cut: dict[int, list[Batch]] = {}  # by the numbers of what was agreed on
        self._do: dict[str, Callable[[Ready, Any], Any]] = {
            ALLGATHER: self._all_gather,
            BROADCAST: self._broadcast,
            ALLTOALL: self._all_to_all,
            REDUCESCATTER: self._reduce_scatter,
            BARRIER: lambda ready, operation: self._collective.barrier(),
        }

    def batches(self, due: Due) -> Iterator[Batch]:
        """What is done at a time: all-reduces that differ in shape only, up to the buffer's size; else one by one."""
        if due.agreed:
            known = self._cut.get(due.numbers)
            if known is None:
                if len(self._cut) >= _MOST_PLANS:
                    self._cut.clear()
                known = self._cut[due.numbers] = [*self._batches(due.agreed)]
            yield from known
        yield from self._batches(due.others)

    def _batches(self, due: Sequence[Ready]) -> Iterator[Batch]:
        batch: list[Ready] = []
        num_bytes = 0
        for ready in due:
            more_bytes = _num_bytes(ready.request)
            if batch and (not _goes_with(batch[0], ready) or num_bytes + more_bytes > self._fusion_bytes):
                yield Batch(batch)
                batch, num_bytes = [], 0
            batch.append(ready)
            num_bytes += more_bytes
        if batch:
            yield Batch(batch)

    @torch.no_grad()
    def run(self, batch: Batch, operations: "Sequence[Operation | None]") -> None:
        """Do it. An operation that is none is another rank's alone: this one has joined."""
        if self._timeline.is_on:
            for ready in batch.ready:
                self._timeline.begins(ready.request)
        first = batch.ready[0]
        if first.request.kind == ALLREDUCE:
            self._all_reduce(batch, operations)
            return
        (operation,) = operations
        if operation is None:  # a barrier of others, which waits for nobody who has joined
            self._do[first.request.kind](first, None)
        elif operation.run is not None:
            operation.result = operation.run(self._collective)
        else:
            operation.result = self._do[first.request.kind](first, operation)

    def _all_reduce(self, batch: Batch, operations: "Sequence[Operation | None]") -> None:
        request = batch.ready[0].request
        inputs = [
            _zeros(ready.request) if operation is None or operation.tensor is None else operation.tensor
            for ready, operation in zip(batch.ready, operations, strict=True)
        ]
        if request.op == ADASUM:
            results = [adasum(scaled(tensor, request.prescale), self._collective) for tensor in inputs]
        else:
            results = self._reduced(batch, inputs)
        if request.postscale != 1.0:
            results = [scaled(result, request.postscale) for result in results]
        outputs, found = [], []
        for operation, result in zip(operations, results, strict=True):
            if operation is not None:
                output = operation.output
                operation.result = output = torch.empty_like(result) if output is None else output
                outputs.append(output)
                found.append(result)
        if outputs:
            torch._foreach_copy_(outputs, found)

    def _reduced(self, batch: Batch, inputs: Sequence[Tensor]) -> list[Tensor]:
        request = batch.ready[0].request
        if len(batch.ready) == 1 and _num_bytes(request) == 0:
            return list(inputs)
        plan = self._plan(batch.plan_key)
        if request.prescale == 1.0:
            torch._foreach_copy_(plan.views, list(inputs))
        else:
            torch._foreach_copy_(plan.views, [scaled(tensor, request.prescale) for tensor in inputs])
        plan.start().wait()
        return plan.views

    def _plan(self, key: _Key) -> _Plan:
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        dtype_name, op_name, shapes = key
        dtype: torch.dtype = getattr(torch, dtype_name)
        counts = [_numel(shape) for shape in shapes]
        flat = self._room(sum(counts) * dtype.itemsize).view(dtype)
        views = [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]
        op: ReduceOp = op_name  # type: ignore[assignment]  # the interface has made it one
        plan = _Plan(views, self._collective.persistent_all_reduce(flat, op=op))
        self._plans[key] = plan
        return plan

    def _room(self, num_bytes: int) -> Tensor:
        """Memory that moves fastest. All ranks need the same at the same time."""
        if self._buffer is None or self._buffer.numel() < num_bytes:
            size = max(num_bytes, min(self._fusion_bytes, 4 * num_bytes), 2**16)
            self._buffer = self._collective.allocate(-(-size // 64) * 64)
            self._plans.clear()
        return self._buffer[:num_bytes]

    def _all_gather(self, ready: Ready, operation: Any) -> Tensor:
        return torch.cat(self._collective.all_gather(operation.tensor.cpu()))

    def _broadcast(self, ready: Ready, operation: Any) -> Tensor:
        target: Tensor = operation.output
        if target is not operation.tensor:
            target.copy_(operation.tensor)
        self._collective.broadcast(target, root=self._ranks.index(ready.request.root))
        return target

    def _all_to_all(self, ready: Ready, operation: Any) -> tuple[Tensor, Tensor]:
        parts = self._collective.all_to_all(list(operation.tensor.split(list(operation.splits))))
        return torch.cat(parts), torch.tensor([len(part) for part in parts], dtype=torch.int32)

    def _reduce_scatter(self, ready: Ready, operation: Any) -> Tensor:
        """The first ranks get a row more where rows cannot be divided evenly."""
        tensor = scaled(operation.tensor, ready.request.prescale)
        least, more = divmod(len(tensor), len(self._ranks))
        rows = [least + (rank < more) for rank in range(len(self._ranks))]
        op: ReduceOp = ready.request.op  # type: ignore[assignment]  # the interface has made it one
        reduced = self._collective.reduce_scatter([part.contiguous() for part in tensor.split(rows)], op=op)
        result = scaled(reduced, ready.request.postscale)
        return result if operation.output is None else operation.output.copy_(result)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """A tensor times a number; whole numbers are cut off towards zero, half precision is multiplied in single."""
    if factor == 1.0:
        return tensor
    if not tensor.is_floating_point():
        return (tensor.double() * factor).to(tensor.dtype)
    return (tensor.float() * factor).to(tensor.dtype) if tensor.dtype.itemsize < 4 else tensor * factor


def _goes_with(first: Ready, ready: Ready) -> bool:
    mine, other = first.request, ready.request
    if ready.error is not None or first.error is not None or mine.kind != ALLREDUCE or mine.op == ADASUM:
        return False
    return (mine.kind, mine.dtype, mine.op, mine.prescale, mine.postscale) == (
        other.kind, other.dtype, other.op, other.prescale, other.postscale
    )  # fmt: skip


def _zeros(request: Request) -> Tensor:
    """What a rank that has joined gives."""
    return torch.zeros(request.shape, dtype=_dtype(request))


def _dtype(request: Request) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, request.dtype)
    return dtype


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _num_bytes(request: Request) -> int:
    return _numel(request.shape) * _dtype(request).itemsize if request.dtype else 0
