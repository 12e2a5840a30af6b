"""Memory that the ranks of a host allocated together: where a tensor lies in it, and the same place in every rank's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.comm.shared_memory.block import SharedBlock


@dataclass(frozen=True)
class _Allocation:
    """What all ranks allocated in one call."""

    blocks: Sequence[SharedBlock]
    """One a rank."""
    start: int
    """Address of this rank's memory in this process."""
    num_bytes: int
    offset_bytes: int
    """Bytes in the allocations before this one: the same on every rank, unlike the address."""


@dataclass(frozen=True)
class SharedTensor:
    """A 1-D tensor in allocated memory."""

    parts: Sequence[Tensor]
    """The same place in every rank's memory."""
    offset_bytes: int
    """Where the tensor begins, counted through all that was allocated: the same on every rank."""


@final
class Allocations:
    """All that the ranks have allocated, seen from one of them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._all: list[_Allocation] = []

    def add(self, blocks: Sequence[SharedBlock]) -> None:
        """`blocks`: one a rank, in rank order."""
        tensor = blocks[self._rank].tensor
        offset = sum(allocation.num_bytes for allocation in self._all)
        self._all.append(_Allocation(blocks, tensor.data_ptr(), tensor.numel(), offset))

    def holds(self, address: int) -> bool:
        return self._holding(address) is not None

    def find(self, address: int, num_elements: int, dtype: torch.dtype) -> SharedTensor | None:
        """The tensor that begins at an address of this process; None if that is not in allocated memory."""
        allocation = self._holding(address)
        if allocation is None:
            return None
        start = address - allocation.start
        stop = start + num_elements * dtype.itemsize
        parts = [block.tensor[start:stop].view(dtype) for block in allocation.blocks]
        return SharedTensor(parts, allocation.offset_bytes + start)

    def close(self) -> None:
        for allocation in self._all:
            for block in allocation.blocks:
                block.close()
        self._all = []

    def _holding(self, address: int) -> _Allocation | None:
        for allocation in self._all:
            if allocation.start <= address < allocation.start + allocation.num_bytes:
                return allocation
        return None
