"""Bytes that pass through the staging slots as they are: from one rank to all, to one, or each to each."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from paceline.comm.base import Timing
from paceline.comm.reduction import Reduction
from paceline.comm.shared_memory.pipeline import Pipeline, Step
from paceline.comm.shared_memory.shares import CACHE_LINE_BYTES
from paceline.comm.signature import Signature

_Piece = Callable[[int, int], None]
"""Writes or reads the piece that begins at a byte, in a slot."""


@final
class Transfers:
    """One rank's part in them: each step moves a piece, and each operation returns when it is over.

    Only ranks that have something to give write, and only ranks that want it read. What `ByteCollective` says of its
    operations holds for those here.
    """

    def __init__(self, pipeline: Pipeline, staging: Sequence[Sequence[Tensor]], rank: int, timing: Timing) -> None:
        """`staging[slot][rank]`: uint8 memory of one slot that `rank` writes."""
        self._pipeline = pipeline
        self._staging = staging
        self._rank = rank
        self._size = len(staging[0])
        self._timing = timing
        self._slot_bytes = staging[0][0].numel()
        self._part_bytes = self._slot_bytes // self._size // CACHE_LINE_BYTES * CACHE_LINE_BYTES
        """Size of the part of a slot that is meant for one rank."""

    def barrier(self) -> None:
        self._pipeline.submit([Step(Signature("barrier"), uses_slot=False)]).wait()

    def broadcast(self, signature: Signature, raw: Tensor, root: int) -> None:
        if self._rank == root:
            self._move(signature, raw.numel(), self._slot_bytes, write=self._writer([raw], self._slot_bytes))
        else:
            self._move(signature, raw.numel(), self._slot_bytes, read=self._reader({root: raw}, self._slot_bytes, 0))
        self._timing.moved_bytes += raw.numel()

    def gather(
        self, signature: Signature, raw: Tensor, lengths: Sequence[int], *, root: int | None
    ) -> list[Tensor] | None:
        taken = {} if root not in (None, self._rank) else self._others(lengths)
        write = self._writer([raw], self._slot_bytes) if root != self._rank else None
        read = self._reader(taken, self._slot_bytes, 0) if root in (None, self._rank) else None
        self._move(signature, max(lengths), self._slot_bytes, write=write, read=read)
        if read is None:
            self._timing.moved_bytes += raw.numel()
            return None
        self._timing.moved_bytes += sum(out.numel() for out in taken.values())
        return self._with_own(taken, raw)

    def exchange(
        self, signature: Signature, outgoing: Sequence[Tensor], lengths: Sequence[int], *, longest: int
    ) -> list[Tensor]:
        given = [raw if rank != self._rank else raw[:0] for rank, raw in enumerate(outgoing)]
        taken = self._others(lengths)
        write, read = self._writer(given, self._part_bytes), self._reader(taken, self._part_bytes, self._rank)
        self._move(signature, longest, self._part_bytes, write=write, read=read)
        self._timing.moved_bytes += sum(raw.numel() for raw in (*given, *taken.values()))
        return self._with_own(taken, outgoing[self._rank])

    def reduce(self, signature: Signature, outgoing: Sequence[Tensor], reduction: Reduction, out: Tensor) -> None:
        """Reduces the pieces where they lie in the slots."""
        place = slice(self._rank * self._part_bytes, (self._rank + 1) * self._part_bytes)

        def read(start: int, slot: int) -> None:
            target = out[start // out.itemsize :][: self._part_bytes // out.itemsize]
            theirs = [staged[place][: target.nbytes].view(out.dtype) for staged in self._staging[slot]]
            reduction(theirs, target)

        num_bytes = max(raw.numel() for raw in outgoing)
        self._move(signature, num_bytes, self._part_bytes, write=self._writer(outgoing, self._part_bytes), read=read)
        self._timing.moved_bytes += (self._size - 2) * out.nbytes + sum(raw.numel() for raw in outgoing)

    def close(self) -> None:
        self._staging = []

    def _move(
        self,
        signature: Signature,
        num_bytes: int,
        piece_bytes: int,
        *,
        write: _Piece | None = None,
        read: _Piece | None = None,
    ) -> None:
        """Pass `num_bytes`, the same number on every rank, through the slots."""
        steps = [
            Step(signature, load=write and partial(write, start), exchange=read and partial(read, start))
            for start in range(0, num_bytes, piece_bytes)
        ]
        self._pipeline.submit(steps or [Step(signature, uses_slot=False)]).wait()

    def _writer(self, raws: Sequence[Tensor], width: int) -> _Piece:
        """Puts the next piece of the i-th tensor into the i-th part, of `width` bytes, of this rank's slot."""

        def write(start: int, slot: int) -> None:
            for number, raw in enumerate(raws):
                _copy(raw[start : start + width], self._staging[slot][self._rank][number * width :])

        return write

    def _reader(self, outs: Mapping[int, Tensor], width: int, part: int) -> _Piece:
        """Takes the next piece of `outs[rank]` from that part of the rank's slot."""

        def read(start: int, slot: int) -> None:
            for rank, out in outs.items():
                _copy(self._staging[slot][rank][part * width :], out[start : start + width])

        return read

    def _others(self, lengths: Sequence[int]) -> dict[int, Tensor]:
        return {
            rank: torch.empty(length, dtype=torch.uint8) for rank, length in enumerate(lengths) if rank != self._rank
        }

    def _with_own(self, taken: Mapping[int, Tensor], own: Tensor) -> list[Tensor]:
        return [taken[rank] if rank != self._rank else own.clone() for rank in range(self._size)]


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy as much as the shorter of two 1-D tensors holds."""
    length = min(source.numel(), target.numel())
    target[:length].copy_(source[:length])
