"""How named tensors lie in one flat buffer: slots in segments, each segment of one dtype and one parameter group."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_FLAGS = 4
"""Flags of a bucket, besides one a tensor."""
ALIGNMENT_BYTES = 64  # a cache line, and the widest vector register


@dataclass(frozen=True)
class TensorSpec:
    """A parameter as the layout sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int = 0
    """Index of the optimizer's parameter group."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """One tensor's place: `offset` elements after the start of its segment."""

    index: int
    """Position of the tensor in the sequence the layout was made from."""
    spec: TensorSpec
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.spec.num_elements


@dataclass(frozen=True)
class Segment:
    """A run of slots of one dtype and one parameter group, seen as one 1-D tensor."""

    dtype: torch.dtype
    group: int
    start_bytes: int
    num_elements: int
    """Padding, and the tail, included."""
    slots: tuple[Slot, ...]
    tail: int
    """Elements kept free at the end of the segment for flags that travel with it."""

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def zero_padding(self, flat: Tensor) -> None:
        """Zero what lies between tensors, and behind them up to the segment's tail: a codec, for one, may have written
        there."""
        ends = [0, *(slot.stop for slot in self.slots)]
        starts = [*(slot.offset for slot in self.slots), self.num_elements - self.tail]
        for start, stop in zip(ends, starts, strict=True):
            if start < stop:
                flat[start:stop].zero_()

    def view(self, buffer: Tensor) -> Tensor:
        """The segment as a 1-D tensor of its dtype; `buffer` is the layout's whole uint8 buffer."""
        return buffer[self.start_bytes : self.start_bytes + self.num_bytes].view(self.dtype)


@dataclass(frozen=True)
class Layout:
    """Segments one after another, each starting on a cache line."""

    segments: tuple[Segment, ...]
    num_bytes: int

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Every tensor as a view of the uint8 `buffer`, in the order the layout was made from."""
        found: dict[int, Tensor] = {}
        for segment in self.segments:
            flat = segment.view(buffer)
            for slot in segment.slots:
                found[slot.index] = flat[slot.offset : slot.stop].view(slot.spec.shape)
        return [found[index] for index in range(len(found))]

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors, in the order the layout was made from."""
        slots = [slot for segment in self.segments for slot in segment.slots]
        return [slot.spec for slot in sorted(slots, key=lambda slot: slot.index)]


def by_group(specs: Sequence[TensorSpec]) -> Layout:
    """One segment for each parameter group and dtype, tensors in their given order: what servers cut into ranges."""
    runs: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, spec in enumerate(specs):
        runs.setdefault((spec.group, spec.dtype), []).append(index)
    return _lay_out(specs, runs.values())


def in_buckets(specs: Sequence[TensorSpec], *, bucket_bytes: int, first_bucket_bytes: int | None = None) -> Layout:
    """Segments of about `bucket_bytes` in reverse order of use: what leaves during backward.

    Each has a tail of `NUM_FLAGS` flags and one element a tensor. The first bucket may be smaller, so that
    communication starts early in backward (Li et al., "PyTorch Distributed", 2020, section 4.2.3).
    """
    runs: list[list[int]] = []
    open_runs: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    for index in reversed(range(len(specs))):
        dtype = specs[index].dtype
        limit = bucket_bytes if runs else min(bucket_bytes, first_bucket_bytes or bucket_bytes)
        if dtype not in open_runs:
            open_runs[dtype], sizes[dtype] = [], 0
        open_runs[dtype].append(index)
        sizes[dtype] += specs[index].num_bytes
        if sizes[dtype] >= limit:
            runs.append(open_runs.pop(dtype))
            sizes.pop(dtype)
    runs.extend(open_runs.values())
    return _lay_out(specs, runs, flags=NUM_FLAGS)


def _lay_out(specs: Sequence[TensorSpec], runs: Iterable[Sequence[int]], *, flags: int = 0) -> Layout:
    segments: list[Segment] = []
    start = 0
    for run in runs:
        dtype = specs[run[0]].dtype
        step = max(1, ALIGNMENT_BYTES // dtype.itemsize)
        slots: list[Slot] = []
        offset = 0
        for index in run:
            slots.append(Slot(index, specs[index], offset))
            offset += _round_up(specs[index].num_elements, step)
        tail = flags + len(run) if flags else 0
        segment = Segment(dtype, specs[run[0]].group, start, _round_up(offset + tail, step), tuple(slots), tail)
        segments.append(segment)
        start += _round_up(segment.num_bytes, ALIGNMENT_BYTES)
    return Layout(tuple(segments), start)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
