"""The kinds of meeting that collectives over shared memory are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from paceline.comm.reduction import Reduction
from paceline.comm.shared_memory.pipeline import Step
from paceline.comm.signature import Signature

SMALL_BYTES = 65536
"""Up to here every rank reduces everything; above it each rank reduces its share."""
_CACHE_LINE_BYTES = 64
# 128 KiB of float32, which stays in the L2 cache between its reduction and its copies. Twice that was 10 % faster for
# 45 MB, but from 32768 elements on torch starts its own threads, on cores on which the other ranks run.
_BLOCK_ELEMENTS = 32768


@final
class SmallReductionPlan:
    """Where the ranks' inputs lie, for every staging slot; shared by all small reductions of one form."""

    def __init__(
        self, slots: Sequence[Sequence[Tensor]], rank: int, signature: Signature, reduction: Reduction
    ) -> None:
        """`slots[slot][rank]`: that rank's input, 1-D, of the dtype to be reduced."""
        self.slots = slots
        self.mine = [parts[rank] for parts in slots]
        self.signature = signature
        self.reduction = reduction
        self.moved_bytes = (len(slots[0]) - 1) * self.mine[0].nbytes


@final
class SmallReduction(Step):
    """Every rank copies its input to staging and reduces everyone's: twice the work, half the meetings."""

    def __init__(self, plan: SmallReductionPlan, tensor: Tensor) -> None:
        self._plan = plan
        self._tensor = tensor
        self.signature = plan.signature
        self.moved_bytes = plan.moved_bytes

    def load(self) -> None:
        self._plan.mine[self.slot].copy_(self._tensor)

    def exchange(self) -> None:
        self._plan.reduction(self._plan.slots[self.slot], self._tensor)


@final
class SharePlan:
    """This rank's share of a tensor that lies at the same place in every rank's memory, cut into blocks.

    The rank reduces its share over all ranks' memory and writes the result to all of them, while nobody else touches
    it. A share starts on a cache line if the tensor does.
    """

    def __init__(self, parts: Sequence[Tensor], rank: int, signature: Signature, reduction: Reduction) -> None:
        """`parts[rank]`: that rank's whole tensor, 1-D."""
        line = max(1, _CACHE_LINE_BYTES // signature.dtype.itemsize)
        num_elements = parts[0].numel()
        share = -(-num_elements // (len(parts) * line)) * line
        start, stop = min(rank * share, num_elements), min((rank + 1) * share, num_elements)
        self._blocks = [
            [part[first : min(first + _BLOCK_ELEMENTS, stop)] for part in parts]
            for first in range(start, stop, _BLOCK_ELEMENTS)
        ]
        self._reduction = reduction
        self.signature = signature
        self.moved_bytes = 2 * (len(parts) - 1) * (stop - start) * signature.dtype.itemsize

    def reduce(self) -> None:
        """Reduce the share and hand it to everyone."""
        for parts in self._blocks:
            # The first rank's memory is the accumulator; nothing private is written.
            result = parts[0]
            self._reduction(parts, result)
            for part in parts[1:]:
                part.copy_(result)


@final
class SharedReduction(Step):
    """Reduces allocated memory where it lies."""

    uses_slot = False
    stores = True

    def __init__(self, plan: SharePlan) -> None:
        self._plan = plan
        self.signature = plan.signature
        self.moved_bytes = plan.moved_bytes

    def load(self) -> None:
        pass

    def exchange(self) -> None:
        self._plan.reduce()


@final
class StagedReduction(Step):
    """Reduces a piece of a tensor in the staging slots, each rank its share, and copies the result back."""

    stores = True

    def __init__(self, plans: Sequence[SharePlan], mine: Sequence[Tensor], tensor: Tensor) -> None:
        """`plans[slot]` and `mine[slot]`: the share, and this rank's whole piece, in that slot."""
        self._plans = plans
        self._mine = mine
        self._tensor = tensor
        self.signature = plans[0].signature
        self.moved_bytes = plans[0].moved_bytes

    def load(self) -> None:
        self._mine[self.slot].copy_(self._tensor)

    def exchange(self) -> None:
        self._plans[self.slot].reduce()

    def store(self) -> None:
        self._tensor.copy_(self._mine[self.slot])


@final
class Transfer(Step):
    """Every rank may write to its slot, then every rank may read all slots."""

    def __init__(
        self,
        signature: Signature,
        *,
        write: Callable[[int], None] | None = None,
        read: Callable[[int], None] | None = None,
        moved_bytes: int = 0,
    ) -> None:
        """`write` and `read` are given the number of the slot."""
        self.signature = signature
        self.uses_slot = write is not None or read is not None
        self.moved_bytes = moved_bytes
        self._write = write
        self._read = read

    def load(self) -> None:
        if self._write is not None:
            self._write(self.slot)

    def exchange(self) -> None:
        if self._read is not None:
            self._read(self.slot)
