"""What is done once all ranks have asked: small all-reduces together, through one buffer."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from paceline.comm.base import Collective, ReduceOp, Work
from paceline.horovod.adasum import adasum
from paceline.horovod.flat import Flat
from paceline.horovod.negotiation import Due, Ready
from paceline.horovod.operation import Operation
from paceline.horovod.requests import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    REDUCESCATTER,
    dtype_of,
)
from paceline.horovod.rooms import Room, Rooms
from paceline.horovod.timeline import Timeline

ADASUM = "adasum"
_MOST_PLANS = 64
_Shapes = Sequence[tuple[int, ...]]


@final
@dataclass(eq=False)
class Batch:
    """What is done at a time."""

    ready: Sequence[Ready]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(each.request.name for each in self.ready)

    @functools.cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Each is moved by itself; the same on all ranks."""
        return tuple(dict.fromkeys(dtype for each in self.ready for dtype in each.request.dtypes))

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for each in self.ready for shape in each.request.shapes)

    @functools.cached_property
    def has_rooms(self) -> bool:
        return self.ready[0].request.has_room

    @functools.cached_property
    def is_on_cpu(self) -> bool:
        return all(tensor.device == "cpu" for each in self.ready for tensor in each.request.members)


@dataclass
class _Plan:
    """All-reduces that are done together, again and again."""

    flat: Flat
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
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self.rooms = Rooms(collective)
        self._cut: dict[int, list[Batch]] = {}  # by the numbers of what was agreed on
        self._do: dict[str, Callable[[Operation, Tensor], Any]] = {
            ALLGATHER: self._all_gather,
            BROADCAST: self._broadcast,
            ALLTOALL: self._all_to_all,
            REDUCESCATTER: self._reduce_scatter,
        }

    def batches(self, due: Due) -> Iterator[Batch]:
        """What is done at a time: all-reduces that differ in shape only, up to the buffer's size; else one by one.

        A group is never cut.
        """
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
            more_bytes = ready.request.num_bytes
            if batch and (not _goes_with(batch[0], ready) or num_bytes + more_bytes > self._fusion_bytes):
                yield Batch(batch)
                batch, num_bytes = [], 0
            batch.append(ready)
            num_bytes += more_bytes
        if batch:
            yield Batch(batch)

    @torch.no_grad()
    def run(self, batch: Batch, operations: Sequence[Operation | None]) -> None:
        """Do it. An operation that is none is another rank's alone: this one has joined."""
        if self._timeline.is_on:
            for ready in batch.ready:
                self._timeline.begins(ready.request)
        kind = batch.ready[0].request.kind
        if kind == ALLREDUCE and batch.has_rooms:
            self._reduce_in_rooms(batch, operations)
            return
        if kind == ALLREDUCE:
            self._all_reduce(batch, operations)
            return
        (operation,) = operations
        if kind == BARRIER:  # of which there is no operation where this rank has joined
            self._collective.barrier()
        elif operation is not None and operation.run is not None:
            operation.result = operation.run(self._collective)
        elif operation is not None:
            operation.result = [self._do[kind](operation, tensor) for tensor in operation.tensors]

    def _all_reduce(self, batch: Batch, operations: Sequence[Operation | None]) -> None:
        present = [mine or _with_zeros(ready) for ready, mine in zip(batch.ready, operations, strict=True)]
        for each in present:
            if each.outputs is None:
                each.outputs = [*map(torch.empty_like, each.tensors)]
        inputs = _all_of(each.tensors for each in present)
        outputs = _all_of(each.outputs or () for each in present)
        # One that was cut otherwise than its request was to lie in a room, and is alone here.
        shapes = present[0].shapes or batch.shapes
        request = batch.ready[0].request
        if request.op == ADASUM:
            found = [adasum(scaled(tensor, request.prescale), self._collective) for tensor in inputs]
            torch._foreach_copy_(outputs, [scaled(tensor, request.postscale) for tensor in found])
        elif len(batch.dtypes) == 1:
            self._reduce(batch, inputs, outputs, shapes)
        else:
            for dtype in map(dtype_of, batch.dtypes):
                chosen = [pair for pair in zip(inputs, outputs, strict=True) if pair[0].dtype == dtype]
                those, results = map(list, zip(*chosen, strict=True))
                self._reduce(batch, those, results, tuple(tuple(each.shape) for each in those))

    def _reduce_in_rooms(self, batch: Batch, operations: Sequence[Operation | None]) -> None:
        """Each where it lies, if its rank has laid it into its room; what another has there has left it before."""
        under_way: list[tuple[Room, Operation | None]] = []
        for ready, mine in zip(batch.ready, operations, strict=True):
            room = self.rooms.find(ready.request) or self.rooms.make(ready.request)
            if room is None:
                self._all_reduce(Batch([ready]), [mine])
                continue
            if mine is None:
                room.given.leave_all()
                room.flat.whole.zero_()
            elif mine.tensors[0] is not room.flat.whole:
                room.flat.whole.copy_(mine.tensors[0])
            _scale(room.flat.whole, ready.request.prescale)
            under_way.append((room, mine))
        works = [start() for start in self.rooms.starts([room for room, _ in under_way])]
        for work in works:
            work.wait()
        for room, mine in under_way:
            _scale(room.flat.whole, room.request.postscale)
            if mine is not None and mine.tensors[0] is not room.flat.whole:
                mine.tensors[0].copy_(room.flat.whole)

    def _reduce(self, batch: Batch, inputs: list[Tensor], outputs: list[Tensor], shapes: _Shapes) -> None:
        """Tensors of one dtype, together. All ranks give as many numbers, however they are cut."""
        request = batch.ready[0].request
        plan = self._plan(inputs[0].dtype, request.op, shapes)
        whole = plan.flat.whole
        if whole.numel() == 0:
            return
        plan.flat.lay(inputs, are_near=batch.is_on_cpu)
        _scale(whole, request.prescale)
        plan.start().wait()
        _scale(whole, request.postscale)
        with torch.inference_mode():  # in which autograd's part is left out of each copy, 50 of 360 ns
            torch._foreach_copy_(outputs, plan.flat.views)

    def _plan(self, dtype: torch.dtype, op: str, shapes: _Shapes) -> _Plan:
        key = (dtype, op, shapes)
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        flat = Flat.cut(self._room(sum(map(math.prod, shapes)) * dtype.itemsize).view(dtype), shapes)
        op_: ReduceOp = op  # type: ignore[assignment]  # the interface has made it one
        start = self._collective.persistent_all_reduce(flat.whole, op=op_)
        plan = self._plans[key] = _Plan(flat, start)
        return plan

    @torch.inference_mode(False)
    def _room(self, num_bytes: int) -> Tensor:
        """Memory that moves fastest. All ranks need the same at the same time."""
        if self._buffer is None or self._buffer.numel() < num_bytes:
            size = max(num_bytes, min(self._fusion_bytes, 4 * num_bytes), 2**16)
            self._buffer = self._collective.allocate(-(-size // 64) * 64)
            self._plans.clear()
        return self._buffer[:num_bytes]

    def _all_gather(self, operation: Operation, tensor: Tensor) -> Tensor:
        return torch.cat(self._collective.all_gather(tensor.cpu()))

    def _broadcast(self, operation: Operation, tensor: Tensor) -> Tensor:
        (target,) = operation.outputs or [tensor]
        if target is not tensor:
            target.copy_(tensor)
        self._collective.broadcast(target, root=self._ranks.index(operation.request.root))
        return target

    def _all_to_all(self, operation: Operation, tensor: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._collective.all_to_all(list(tensor.split(list(operation.splits))))
        return torch.cat(parts), torch.tensor([len(part) for part in parts], dtype=torch.int32)

    def _reduce_scatter(self, operation: Operation, tensor: Tensor) -> Tensor:
        """The first ranks get a row more where rows cannot be divided evenly."""
        request = operation.request
        least, more = divmod(len(tensor), len(self._ranks))
        rows = [least + (rank < more) for rank in range(len(self._ranks))]
        parts = [part.contiguous() for part in scaled(tensor, request.prescale).split(rows)]
        op: ReduceOp = request.op  # type: ignore[assignment]  # the interface has made it one
        return scaled(self._collective.reduce_scatter(parts, op=op), request.postscale)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """A tensor times a number; whole numbers are cut off towards zero, half precision is multiplied in single."""
    if factor == 1.0:
        return tensor
    if not tensor.is_floating_point():
        return (tensor.double() * factor).to(tensor.dtype)
    return (tensor.float() * factor).to(tensor.dtype) if tensor.dtype.itemsize < 4 else tensor * factor


def _scale(whole: Tensor, factor: float) -> None:
    if factor != 1.0:
        whole.copy_(scaled(whole, factor))


def _goes_with(first: Ready, ready: Ready) -> bool:
    mine, other = first.request, ready.request
    if ready.error is not None or first.error is not None or mine.kind != ALLREDUCE or mine.op == ADASUM:
        return False
    return (mine.kind, mine.has_room, mine.dtypes, mine.op, mine.prescale, mine.postscale) == (
        other.kind, other.has_room, other.dtypes, other.op, other.prescale, other.postscale
    )  # fmt: skip


def _all_of(several: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    return [*itertools.chain.from_iterable(several)]


def _with_zeros(ready: Ready) -> Operation:
    """What a rank that has joined gives, in the place of its own operation."""
    zeros = [torch.zeros(each.shape, dtype=dtype_of(each.dtype)) for each in ready.request.members]
    return Operation(ready.request, zeros, zeros)
