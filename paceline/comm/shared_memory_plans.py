"""What stays the same between all-reduces of the same form: views of every rank's memory, signature, scratch memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.comm.arguments import pieces
from paceline.comm.base import ReduceOp
from paceline.comm.reduction import Reduction
from paceline.comm.segment import Segment
from paceline.comm.shared_memory_pipeline import Step
from paceline.comm.shared_memory_steps import (
    SMALL_BYTES,
    SharedReduction,
    SharePlan,
    SmallReduction,
    SmallReductionPlan,
    StagedReduction,
)
from paceline.comm.signature import Signature

_NUM_CACHED = 4096


@dataclass(frozen=True)
class Allocation:
    """Memory that all ranks allocated in one call."""

    segments: tuple[Segment, ...]
    """One a rank."""
    start: int
    """Address of this rank's memory in this process."""
    num_bytes: int
    offset_bytes: int
    """Bytes in the allocations before this one: the same on every rank, unlike the address."""


@final
class ReductionPlans:
    """Chooses how a tensor is reduced, and prepares that once for each form.

    Without the cache an all-reduce of 12 KB between two ranks takes 24 us instead of 10 us.
    """

    def __init__(self, staging: Sequence[Sequence[Tensor]], rank: int) -> None:
        """`staging[slot][rank]`: uint8 memory of one slot."""
        self._staging = staging
        self._rank = rank
        self._allocations: list[Allocation] = []
        self._reduction = functools.cache(Reduction)
        self._small = functools.lru_cache(_NUM_CACHED)(self._make_small)
        self._staged = functools.lru_cache(_NUM_CACHED)(self._make_staged)
        self._shared = functools.lru_cache(_NUM_CACHED)(self._make_shared)

    def add(self, segments: tuple[Segment, ...]) -> None:
        """From now on tensors in these segments, one a rank, are reduced where they lie."""
        tensor = segments[self._rank].tensor
        offset = sum(allocation.num_bytes for allocation in self._allocations)
        self._allocations.append(Allocation(segments, tensor.data_ptr(), tensor.numel(), offset))

    def steps(self, flat: Tensor, op: ReduceOp) -> list[Step]:
        """The meetings that reduce the contiguous 1-D tensor."""
        num_elements, dtype = flat.numel(), flat.dtype
        if flat.nbytes <= SMALL_BYTES:
            return [SmallReduction(self._small(num_elements, dtype, op), flat)]
        if self._find(flat.data_ptr()) is not None:
            return [SharedReduction(self._shared(flat.data_ptr(), num_elements, dtype, op))]
        slot_elements = self._staging[0][0].numel() // dtype.itemsize
        return [
            StagedReduction(*self._staged(num_elements, piece.numel(), dtype, op), piece)
            for piece in pieces(flat, slot_elements)
        ]

    def reduction(self, op: ReduceOp, dtype: torch.dtype) -> Reduction:
        return self._reduction(op, dtype)

    def close(self) -> None:
        """Let go of all memory."""
        for segment in (segment for allocation in self._allocations for segment in allocation.segments):
            segment.close()
        self._allocations = []
        self._staging = []
        for plans in (self._small, self._staged, self._shared):
            plans.cache_clear()

    def _find(self, address: int) -> Allocation | None:
        for allocation in self._allocations:
            if allocation.start <= address < allocation.start + allocation.num_bytes:
                return allocation
        return None

    def _in_slots(self, num_elements: int, dtype: torch.dtype) -> list[list[Tensor]]:
        num_bytes = num_elements * dtype.itemsize
        return [[staged[:num_bytes].view(dtype) for staged in parts] for parts in self._staging]

    def _make_small(self, num_elements: int, dtype: torch.dtype, op: ReduceOp) -> SmallReductionPlan:
        signature = Signature("all_reduce", dtype, num_elements, op)
        slots = self._in_slots(num_elements, dtype)
        return SmallReductionPlan(slots, self._rank, signature, self._reduction(op, dtype))

    def _make_staged(
        self, num_elements: int, piece_elements: int, dtype: torch.dtype, op: ReduceOp
    ) -> tuple[list[SharePlan], list[Tensor]]:
        signature = Signature("all_reduce", dtype, num_elements, op)
        slots = self._in_slots(piece_elements, dtype)
        plans = [SharePlan(parts, self._rank, signature, self._reduction(op, dtype)) for parts in slots]
        return plans, [parts[self._rank] for parts in slots]

    def _make_shared(self, address: int, num_elements: int, dtype: torch.dtype, op: ReduceOp) -> SharePlan:
        allocation = self._find(address)
        assert allocation is not None  # looked up just before
        start = address - allocation.start
        stop = start + num_elements * dtype.itemsize
        parts = [segment.tensor[start:stop].view(dtype) for segment in allocation.segments]
        offset = allocation.offset_bytes + start
        signature = Signature("all_reduce", dtype, num_elements, op, offset_bytes=offset)
        return SharePlan(parts, self._rank, signature, self._reduction(op, dtype))
