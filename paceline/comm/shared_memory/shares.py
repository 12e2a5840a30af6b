"""One half of an all-reduce at a time, in memory that the ranks of a host map: reduce shares, later hand them round."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from paceline.comm.arguments import pieces
from paceline.comm.base import ReduceOp, Timing, Work
from paceline.comm.reduction import Reduction
from paceline.comm.shared_memory.allocations import Allocations
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.comm.shared_memory.pipeline import Pipeline, Step
from paceline.comm.shared_memory.rendezvous import PAGE_BYTES, Rendezvous
from paceline.comm.signature import Signature
from paceline.comm.world_ranks import NamedWork, naming
from paceline.division import divide

_CACHE_LINE_BYTES = 64
_BLOCK_ELEMENTS = 32768  # as in shared_memory_steps: small enough for the L2 cache, and for torch to start no threads
_NUM_CACHED = 4096


@final
class Division:
    """A tensor that lies at the same place in every rank's memory, with a share of it for each rank.

    A rank reduces its share of all ranks' memory into `total`, and nobody else touches that share of its memory until
    the shares are handed round.
    """

    def __init__(self, parts: Sequence[Tensor], rank: int, signature: Signature, *, is_led: bool) -> None:
        """`parts[rank]`: that rank's whole tensor, 1-D. `is_led`: rank 0's share is everything."""
        bounds = _bounds(parts[0], len(parts), is_led=is_led)
        shares = [slice(start, stop) for start, stop in pairwise(bounds)]
        mine = parts[rank]
        op = signature.op or "sum"
        self.signature = signature
        self._is_mean = op == "mean"
        self.op: ReduceOp = "sum" if self._is_mean else op
        """What to reduce `total` with, over those who hold the same share."""
        self._share = mine[shares[rank]]
        is_half = mine.dtype in (torch.float16, torch.bfloat16)
        self.total = torch.empty_like(self._share, dtype=torch.float32) if is_half else self._share
        """This rank's share: of half precision in float32, else in the memory itself."""
        # The first is the accumulator, and may be the memory that the result goes to.
        accumulated = [mine, *(part for other, part in enumerate(parts) if other != rank)]
        blocks = zip(
            *(pieces(part[shares[rank]], _BLOCK_ELEMENTS) for part in accumulated),
            pieces(self.total, _BLOCK_ELEMENTS),
            strict=True,
        )
        self.blocks = [block for block in blocks if block[0].numel()]
        """Of each block of the share: every rank's, then `total`'s."""
        self.copies = [
            (part[share], mine[share])
            for other, (part, share) in enumerate(zip(parts, shares, strict=True))
            if other != rank and share.start < share.stop
        ]
        """Where another's share is, and where it belongs here."""

    def settle(self, *, size: int) -> None:
        """Put `total`, by now reduced over `size` ranks, where the others find it."""
        if self._is_mean:
            divide(self.total, size)
        if self.total is not self._share:
            self._share.copy_(self.total)


@final
class Shares:
    """The ranks of one host, meeting twice for each tensor: once to reduce shares of it, once to hand them round.

    What happens between the two is the caller's, and the ranks need not be done with it in the same order as each
    other: the two kinds of meeting are counted apart. Only their order within a kind must be the same on every rank.
    Errors speak of world ranks.
    """

    def __init__(
        self,
        *,
        rank: int,
        ranks: Sequence[int],
        gather: Callable[[Tensor], list[Tensor]],
        meet: Callable[[], None],
        deadline_s: float | None,
    ) -> None:
        """Meet the other ranks of the host. Collective call.

        Args:
            rank: this rank's number on its host.
            ranks: the world ranks of this host's ranks, for errors.
            gather: returns the 1-D tensors that all ranks of this host call it with, in their order.
            meet: returns once all ranks of this host have called it.

        Raises:
            PeerLost: another rank's process is gone, or its memory cannot be opened.
            OSError: there is no descriptor or no address space left.
        """
        self.timing = Timing()
        self._rank = rank
        self._ranks = ranks
        self._gather = gather
        self._meet = meet
        self._allocations = Allocations(rank)
        self._reduction = functools.cache(Reduction)
        self._divided = functools.lru_cache(_NUM_CACHED)(self._divide)
        rendezvous: list[Rendezvous] = []
        for _ in range(2):
            page = SharedBlock.create(PAGE_BYTES)
            Rendezvous.prepare(page)
            addresses = self._addresses(page)
            with naming(ranks):
                found = Rendezvous(
                    rank=rank, addresses=addresses, control=page, deadline_s=deadline_s, timing=self.timing
                )
            rendezvous.append(found)
            meet()
            page.close_descriptor()
        self._to_reduce, self._to_hand_round = rendezvous
        self._reducing, self._handing_round = (Pipeline(each, self.timing) for each in rendezvous)

    def allocate(self, num_bytes: int) -> Tensor:
        """A zeroed uint8 tensor of shape (num_bytes,) that all ranks map. Collective call; sizes must agree."""
        self._divided.cache_clear()  # it also remembers which addresses were in no allocated memory
        mine = SharedBlock.create(num_bytes)
        try:
            segments = tuple(
                mine if address == mine.address else SharedBlock.open(address) for address in self._addresses(mine)
            )
            self._meet()
        finally:
            mine.close_descriptor()
        self._allocations.add(segments)
        return mine.tensor

    def divide(self, flat: Tensor, op: ReduceOp, *, is_led: bool) -> Division | None:
        """How a contiguous 1-D tensor is shared; None of one that is not in allocated memory."""
        return self._divided(flat.data_ptr(), flat.numel(), flat.dtype, op, is_led)

    def reduce(self, division: Division) -> Work:
        """Start to reduce this rank's share of all ranks' memory into `division.total`. Never blocks."""
        step = _ReduceShare(division, self._reduction(division.op, division.signature.dtype))
        return self._submit(self._reducing, step)

    def hand_round(self, division: Division) -> Work:
        """Start to give every rank every share. Never blocks. This rank's share must be settled."""
        return self._submit(self._handing_round, _HandRound(division))

    def set_deadline(self, deadline_s: float | None) -> None:
        self._to_reduce.deadline_s = self._to_hand_round.deadline_s = deadline_s

    def leave(self, error: Exception) -> None:
        """End every present and future call, and tell the others why; callable from any thread."""
        self._to_reduce.leave(error)
        self._to_hand_round.leave(error)

    def close(self) -> None:
        """Leave, and let go of the memory; allocated tensors stay readable here."""
        for rendezvous, pipeline in (
            (self._to_reduce, self._reducing),
            (self._to_hand_round, self._handing_round),
        ):
            rendezvous.close()
            pipeline.close()
        self._allocations.close()
        self._divided.cache_clear()

    def _submit(self, pipeline: Pipeline, step: Step) -> Work:
        with naming(self._ranks):
            return NamedWork(pipeline.submit([step]), self._ranks)

    def _addresses(self, mine: SharedBlock) -> list[BlockAddress]:
        address = mine.address
        rows = self._gather(torch.tensor([address.pid, address.fd, address.num_bytes]))
        return [BlockAddress(*row.tolist()) for row in rows]

    def _divide(
        self, address: int, num_elements: int, dtype: torch.dtype, op: ReduceOp, is_led: bool
    ) -> Division | None:
        found = self._allocations.place(address, num_elements, dtype)
        if found is None:
            return None
        signature = Signature("all_reduce", dtype, num_elements, op, offset_bytes=found.offset_bytes)
        return Division(found.parts, self._rank, signature, is_led=is_led)


@final
class _ReduceShare(Step):
    """Every rank's tensor is in place; each reduces its share. Over as soon as this rank is done."""

    uses_slot = False

    def __init__(self, division: Division, reduction: Reduction) -> None:
        self.signature = division.signature
        self._division = division
        self._reduction = reduction
        num_others = len(division.blocks[0]) - 2 if division.blocks else 0
        self.moved_bytes = num_others * sum(block[0].nbytes for block in division.blocks)

    def load(self) -> None:
        pass

    def exchange(self) -> None:
        for *parts, total in self._division.blocks:
            self._reduction(parts, total)


@final
class _HandRound(Step):
    """Every rank's share is settled; each copies the others'. Over when nobody reads this rank's memory any more."""

    uses_slot = False
    stores = True

    def __init__(self, division: Division) -> None:
        self.signature = division.signature
        self._copies = division.copies
        self.moved_bytes = sum(theirs.nbytes for theirs, _ in division.copies)

    def load(self) -> None:
        pass

    def exchange(self) -> None:
        for theirs, mine in self._copies:
            mine.copy_(theirs)


def _bounds(tensor: Tensor, size: int, *, is_led: bool) -> list[int]:
    """Where the shares of `size` ranks begin and end: on cache lines, if the tensor does."""
    if is_led:
        return [0] + [tensor.numel()] * size
    line = max(1, _CACHE_LINE_BYTES // tensor.itemsize)
    share = -(-tensor.numel() // (size * line)) * line
    return [min(rank * share, tensor.numel()) for rank in range(size + 1)]
