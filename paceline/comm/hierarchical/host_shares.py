"""The two halves of an all-reduce inside one host: the ranks reduce a share each, and later hand the shares round."""

import functools
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.comm.base import ReduceOp, Timing, Work
from paceline.comm.reduction import Reduction
from paceline.comm.shared_memory.allocations import Allocations
from paceline.comm.shared_memory.block import SharedBlock, exchange_blocks
from paceline.comm.shared_memory.pipeline import Pipeline, Step
from paceline.comm.shared_memory.rendezvous import PAGE_BYTES, Rendezvous
from paceline.comm.shared_memory.shares import blocks_of, shares_of
from paceline.comm.signature import Signature
from paceline.division import divide

_NUM_CACHED = 4096


@final
class Division:
    """A tensor that lies at the same place in every rank's memory, with a share of it for each rank.

    A rank reduces its share of all ranks' memory into `total`, and nobody else touches that share of its memory until
    the shares are handed round.
    """

    def __init__(self, parts: Sequence[Tensor], rank: int, signature: Signature, *, is_led: bool) -> None:
        """`parts[rank]`: that rank's whole tensor, 1-D. `is_led`: rank 0's share is everything."""
        mine, size = parts[rank], len(parts)
        end = mine.numel()
        shares = [slice(0, end)] + [slice(end, end)] * (size - 1) if is_led else shares_of(mine, size)
        op = signature.op or "sum"
        self.signature = signature
        self._is_mean = op == "mean"
        self.op: ReduceOp = "sum" if self._is_mean else op
        """What to reduce `total` with, over those who hold the same share."""
        self._share = mine[shares[rank]]
        is_half = mine.dtype in (torch.float16, torch.bfloat16)
        self.total = torch.empty_like(self._share, dtype=torch.float32) if is_half else self._share
        """This rank's share: of half precision in float32, else in the memory itself."""
        # `Reduction` accumulates in the first part, which may be the memory of the result.
        others = [part[shares[rank]] for other, part in enumerate(parts) if other != rank]
        self.blocks = blocks_of([self._share, *others, self.total])
        """Each block of the share: this rank's memory, the other ranks', then `total`'s."""
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
class HostShares:
    """The ranks of one host, meeting twice for each tensor: once to reduce shares of it, once to hand them round.

    The two kinds of meeting are counted apart, so that ranks may be done in different orders with what happens between
    them. Within a kind the order must be the same on every rank.
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
            ranks: the world's number of each, for errors.
            gather: returns the 1-D tensors that all ranks of this host call it with, in their order.
            meet: returns once all ranks of this host have called it.
        """
        self.timing = Timing()
        self._rank = rank
        self._ranks = ranks
        self._gather = gather
        self._meet = meet
        self._allocations = Allocations(rank)
        self._reduction = functools.cache(Reduction)
        self._divided = functools.lru_cache(_NUM_CACHED)(self._divide)
        self._to_reduce, self._to_hand_round = (self._rendezvous(deadline_s) for _ in range(2))
        self._reducing, self._handing_round = (
            Pipeline(rendezvous, self.timing) for rendezvous in (self._to_reduce, self._to_hand_round)
        )

    def allocate(self, num_bytes: int) -> Tensor:
        """A zeroed uint8 tensor of shape (num_bytes,) that all ranks map. Collective call; sizes must agree."""
        self._divided.cache_clear()  # it also remembers which addresses were in no allocated memory
        mine = SharedBlock.create(num_bytes)
        self._allocations.add(exchange_blocks(mine, self._gather, self._meet))
        return mine.tensor

    def divide(self, flat: Tensor, op: ReduceOp, *, is_led: bool) -> Division | None:
        """How a contiguous 1-D tensor is shared; None of one that is not in allocated memory."""
        return self._divided(flat.data_ptr(), flat.numel(), flat.dtype, op, is_led)

    def reduce(self, division: Division) -> Work:
        """Start to reduce this rank's share of all ranks' memory into `division.total`. Never blocks.

        The work is over as soon as this rank is done.
        """
        reduction = self._reduction(division.op, division.signature.dtype)

        def exchange(_: int) -> None:
            for *parts, total in division.blocks:
                reduction(parts, total)

        num_others = len(division.blocks[0]) - 2 if division.blocks else 0
        moved_bytes = num_others * sum(block[0].nbytes for block in division.blocks)
        step = Step(division.signature, exchange=exchange, uses_slot=False, moved_bytes=moved_bytes)
        return self._reducing.submit([step])

    def hand_round(self, division: Division) -> Work:
        """Start to give every rank every share. Never blocks. This rank's share must be settled.

        The work is over when nobody reads this rank's memory any more.
        """

        def exchange(_: int) -> None:
            for theirs, mine in division.copies:
                mine.copy_(theirs)

        moved_bytes = sum(theirs.nbytes for theirs, _ in division.copies)
        step = Step(division.signature, exchange=exchange, uses_slot=False, awaits_all=True, moved_bytes=moved_bytes)
        return self._handing_round.submit([step])

    def set_deadline(self, deadline_s: float | None) -> None:
        self._to_reduce.deadline_s = self._to_hand_round.deadline_s = deadline_s

    def leave(self, error: Exception) -> None:
        """End every present and future call, and tell the others why; callable from any thread."""
        self._to_reduce.leave(error)
        self._to_hand_round.leave(error)

    def close(self) -> None:
        """Leave, and let go of the memory; allocated tensors stay readable here."""
        for part in (self._to_reduce, self._to_hand_round, self._reducing, self._handing_round, self._allocations):
            part.close()
        self._divided.cache_clear()

    def _rendezvous(self, deadline_s: float | None) -> Rendezvous:
        page = SharedBlock.create(PAGE_BYTES)
        Rendezvous.prepare(page)
        addresses = page.address.gathered(self._gather)
        rendezvous = Rendezvous(
            rank=self._rank,
            addresses=addresses,
            control=page,
            deadline_s=deadline_s,
            timing=self.timing,
            names=self._ranks,
        )
        self._meet()
        page.close_descriptor()
        return rendezvous

    def _divide(
        self, address: int, num_elements: int, dtype: torch.dtype, op: ReduceOp, is_led: bool
    ) -> Division | None:
        found = self._allocations.find(address, num_elements, dtype)
        if found is None:
            return None
        signature = Signature("all_reduce", dtype, num_elements, op, offset_bytes=found.offset_bytes)
        return Division(found.parts, self._rank, signature, is_led=is_led)
