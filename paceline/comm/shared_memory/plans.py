"""How an all-reduce over shared memory is done, and what stays the same between all-reduces of one form."""

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from paceline.arrays import as_array
from paceline.comm.arguments import pieces
from paceline.comm.base import NonFinite, ReduceOp
from paceline.comm.reduction import ArrayReduction, Reduction, quietly
from paceline.comm.shared_memory.allocations import Allocations
from paceline.comm.shared_memory.block import SharedBlock
from paceline.comm.shared_memory.finding import find, moved, seems_finite
from paceline.comm.shared_memory.pipeline import Step
from paceline.comm.shared_memory.shares import blocks_of, shares_of
from paceline.comm.signature import Signature

SMALL_BYTES = 65536
"""Up to here every rank reduces everything; above it each rank reduces its share."""
_NUM_CACHED = 4096
_MOST_SQUARES = 8192  # elements: for more than 10,000 OpenBLAS, which numpy is built with, takes threads of its own


@final
class ReductionPlans:
    """Chooses how a tensor is reduced, and prepares that once for each form.

    Without the cache an all-reduce of 12 KB between two ranks takes 24 us instead of 10 us.
    """

    def __init__(self, staging: Sequence[Sequence[Tensor]], rank: int) -> None:
        """`staging[slot][rank]`: uint8 memory of one slot."""
        self._staging = staging
        self._rank = rank
        self._allocations = Allocations(rank)
        self._reduction = functools.cache(Reduction)
        self._small = functools.lru_cache(_NUM_CACHED)(self._plan_small)
        self._staged = functools.lru_cache(_NUM_CACHED)(self._plan_staged)
        self._shared = functools.lru_cache(_NUM_CACHED)(self._plan_shared)

    def add(self, blocks: Sequence[SharedBlock]) -> None:
        """From now on tensors in these blocks, one a rank, are reduced where they lie."""
        self._allocations.add(blocks)

    def steps(self, flat: Tensor, op: ReduceOp, *, is_watched: bool = False) -> list[Step]:
        """The meetings that reduce the contiguous 1-D tensor; watched ones tell what is not finite in the result."""
        num_elements, dtype = flat.numel(), flat.dtype
        if flat.nbytes <= SMALL_BYTES:
            return [self._small(num_elements, dtype, op).step(flat, is_watched=is_watched)]
        if self._allocations.holds(flat.data_ptr()):
            return [self._shared(flat.data_ptr(), num_elements, dtype, op).step_in_place(is_watched=is_watched)]
        slot_elements = self._staging[0][0].numel() // dtype.itemsize
        return [
            self._staged(num_elements, piece.numel(), dtype, op).step(
                piece, first_element=number * slot_elements, is_watched=is_watched
            )
            for number, piece in enumerate(pieces(flat, slot_elements))
        ]

    def close(self) -> None:
        self._allocations.close()
        self._staging = []
        for plans in (self._small, self._staged, self._shared):
            plans.cache_clear()

    def _in_slots(self, num_elements: int, dtype: torch.dtype) -> list[list[Tensor]]:
        num_bytes = num_elements * dtype.itemsize
        return [[staged[:num_bytes].view(dtype) for staged in parts] for parts in self._staging]

    def _plan_small(self, num_elements: int, dtype: torch.dtype, op: ReduceOp) -> "_SmallPlan":
        signature = Signature("all_reduce", dtype, num_elements, op)
        with torch.inference_mode(False):  # of an evaluation that asks first; what it makes nobody else could write to
            slots = self._in_slots(num_elements, dtype)
            return _SmallPlan(slots, self._rank, signature, self._reduction(op, dtype), op)

    def _plan_staged(self, num_elements: int, piece_elements: int, dtype: torch.dtype, op: ReduceOp) -> "_StagedPlan":
        signature = Signature("all_reduce", dtype, num_elements, op)
        with torch.inference_mode(False):
            slots = self._in_slots(piece_elements, dtype)
            return _StagedPlan(slots, self._rank, signature, self._reduction(op, dtype))

    def _plan_shared(self, address: int, num_elements: int, dtype: torch.dtype, op: ReduceOp) -> "_SharePlan":
        found = self._allocations.find(address, num_elements, dtype)
        assert found is not None  # looked up just before
        signature = Signature("all_reduce", dtype, num_elements, op, offset_bytes=found.offset_bytes)
        with torch.inference_mode(False):
            return _SharePlan(found.parts, self._rank, signature, self._reduction(op, dtype))


@final
class _SmallPlan:
    """Every rank copies its input to staging and reduces everyone's: twice the work, half the meetings.

    Its operations are numpy's where numpy knows the dtype: of the 90 us that they took on a conv net 60 are saved.
    """

    def __init__(
        self, slots: Sequence[Sequence[Tensor]], rank: int, signature: Signature, reduction: Reduction, op: ReduceOp
    ) -> None:
        """`slots[slot][rank]`: that rank's input, 1-D, of the dtype to be reduced."""
        self._slots = slots
        self._signature = signature
        self._moved_bytes = (len(slots[0]) - 1) * slots[0][0].nbytes
        in_arrays = signature.dtype in (torch.float32, torch.float64)
        self._view: Callable[[Tensor], Any] = as_array if in_arrays else lambda tensor: tensor
        self._views: list[list[Any]] = [[self._view(part) for part in parts] for parts in slots]
        self._mine = [parts[rank] for parts in self._views]
        size = len(slots[0])
        # Where each rank's share is a power of two, it is the same before the sum as after it, but for what is
        # subnormal and for sums that overflow. Taken before, it is no operation more than the copy, and one less where
        # other ranks may be waited for.
        self._share: Any = None
        if in_arrays and op == "mean" and size & (size - 1) == 0:
            self._share, op = np.array(1 / size, self._mine[0].dtype), "sum"
        self._reduction: Callable[[Sequence[Any], Any], None] = ArrayReduction(op) if in_arrays else reduction
        self._quietly = quietly()
        has_squares = in_arrays and slots[0][0].numel() <= _MOST_SQUARES
        self._total: Callable[[Any], float] = _sum_of_squares if has_squares else _sum

    def step(self, tensor: Tensor, *, is_watched: bool) -> Step:
        target = self._view(tensor)

        load = partial(self._quietly, self._load, target)
        exchange = partial(self._quietly, self._reduce, target, tensor if is_watched else None)
        return Step(self._signature, load=load, exchange=exchange, is_watched=is_watched, moved_bytes=self._moved_bytes)

    def _load(self, target: Any, slot: int) -> None:
        if self._share is None:
            self._mine[slot][:] = target
        else:
            np.multiply(target, self._share, self._mine[slot])

    def _reduce(self, target: Any, watched: Tensor | None, slot: int) -> NonFinite | None:
        """Into the target, which is the same memory as the tensor that is watched, if one is."""
        self._reduction(self._views[slot], target)
        if watched is None or math.isfinite(self._total(target)):
            return None
        return find(self._slots[slot], watched)


def _sum(values: Any) -> float:
    return float(values.sum())


def _sum_of_squares(array: Any) -> float:
    """Not finite where an element is not. Where no code is in the caches numpy takes 12 us less for it than for a
    sum."""
    return float(array.dot(array))


@final
class _SharePlan:
    """A rank reduces its share over all ranks' memory and writes the result to all, while nobody else touches it."""

    def __init__(self, parts: Sequence[Tensor], rank: int, signature: Signature, reduction: Reduction) -> None:
        """`parts[rank]`: that rank's whole tensor, 1-D."""
        share = shares_of(parts[rank], len(parts))[rank]
        self._first_element = share.start
        self._blocks = blocks_of([part[share] for part in parts])
        self._reduction = reduction
        self._signature = signature
        self.moved_bytes = 2 * (len(parts) - 1) * sum(block[0].nbytes for block in self._blocks)

    def reduce(self, *, is_watched: bool) -> NonFinite | None:
        """Reduce this rank's share. Returns what its mean has that is not finite, if that is watched: each block is
        looked at while it is in the cache."""
        found: NonFinite | None = None
        first_element = self._first_element
        for parts in self._blocks:
            result = parts[0]  # the first rank's memory, so that nothing else is written
            self._reduction(parts, result)
            if is_watched and found is None and not seems_finite(result):
                found = moved(find(parts, result), by=first_element)
            for part in parts[1:]:
                part.copy_(result)
            first_element += result.numel()
        return found

    def step_in_place(self, *, is_watched: bool) -> Step:
        return Step(
            self._signature,
            exchange=lambda _: self.reduce(is_watched=is_watched),
            uses_slot=False,
            awaits_all=True,
            is_watched=is_watched,
            moved_bytes=self.moved_bytes,
        )


@final
class _StagedPlan:
    """Every rank copies a piece to staging, reduces its share of it there, and copies the result back."""

    def __init__(
        self, slots: Sequence[Sequence[Tensor]], rank: int, signature: Signature, reduction: Reduction
    ) -> None:
        """`slots[slot][rank]`: that rank's piece, 1-D."""
        self._plans = [_SharePlan(parts, rank, signature, reduction) for parts in slots]
        self._mine = [parts[rank] for parts in slots]
        self._signature = signature

    def step(self, tensor: Tensor, *, first_element: int, is_watched: bool) -> Step:
        """`tensor`: the piece that begins at that element of the whole."""
        return Step(
            self._signature,
            load=lambda slot: self._mine[slot].copy_(tensor),
            exchange=lambda slot: moved(self._plans[slot].reduce(is_watched=is_watched), by=first_element),
            store=lambda slot: tensor.copy_(self._mine[slot]),
            awaits_all=True,
            is_watched=is_watched,
            moved_bytes=self._plans[0].moved_bytes,
        )
