"""Collectives that pass tensors through the staging slots as they are: broadcast, gather, scatter and their like."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.comm.arguments import flatten, pieces
from paceline.comm.base import ReduceOp, Timing
from paceline.comm.reduction import Reduction
from paceline.comm.shared_memory.pipeline import Pipeline, Step
from paceline.comm.shared_memory.steps import Transfer
from paceline.comm.signature import FORM_NUMBERS, Signature, TensorForm, pack_forms, unpack_forms
from paceline.errors import TensorMismatch

_CACHE_LINE_BYTES = 64


@final
class Transfers:
    """One rank's part in them. Every operation returns when it is over; arguments have been checked.

    Each is a number of meetings of all ranks: in the first the ranks say what forms their tensors have, where that is
    not known, and in each other one a piece moves. Only who has something to give writes, and only who wants it reads.
    """

    def __init__(self, pipeline: Pipeline, staging: Sequence[Sequence[Tensor]], rank: int, timing: Timing) -> None:
        """`staging[slot][rank]`: uint8 memory of one slot that `rank` writes."""
        self._pipeline = pipeline
        self._staging = staging
        self._rank = rank
        self._size = len(staging[0])
        self._timing = timing
        self._slot_bytes = staging[0][0].numel()
        self._part_bytes = self._slot_bytes // self._size // _CACHE_LINE_BYTES * _CACHE_LINE_BYTES
        """Size of the part of a slot that is meant for one rank."""

    def barrier(self) -> None:
        self._run([Transfer(Signature("barrier"))])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        flat, copy_back = flatten(tensor, device_type="cpu", is_target=True)
        signature = Signature("broadcast", tensor.dtype, tensor.numel(), root=root)

        def write(piece: Tensor, slot: int) -> None:
            _copy(piece, self._staging[slot][root])

        def read(piece: Tensor, slot: int) -> None:
            _copy(self._staging[slot][root], piece)

        def step(piece: Tensor) -> Step:
            if self._rank == root:
                return Transfer(signature, write=functools.partial(write, piece), moved_bytes=piece.numel())
            return Transfer(signature, read=functools.partial(read, piece), moved_bytes=piece.numel())

        self._run([step(piece) for piece in pieces(flat.view(torch.uint8), self._slot_bytes)])
        if copy_back is not None:
            copy_back()

    def gather(self, tensor: Tensor, root: int) -> list[Tensor] | None:
        signature = Signature("gather", tensor.dtype, root=root)
        forms = [theirs[0] for theirs in self._exchange_forms(signature, [tensor])]
        if self._rank == root:
            return self._collect(signature, tensor, forms)
        mine = _raw(tensor)
        self._transfer(signature, _longest(forms), self._slot_bytes, write=self._writer(mine))
        self._timing.moved_bytes += mine.numel()
        return None

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        signature = Signature("all_gather", tensor.dtype)
        forms = [theirs[0] for theirs in self._exchange_forms(signature, [tensor])]
        return self._collect(signature, tensor, forms, write=self._writer(_raw(tensor)))

    def scatter(self, tensors: Sequence[Tensor] | None, root: int) -> Tensor:
        signature = Signature("scatter", root=root)
        forms = self._hear_forms(signature, tensors, root)
        num_bytes = _longest([form for rank, form in enumerate(forms) if rank != root])
        if tensors is not None:
            raws = [_raw(tensor) for tensor in tensors]
            raws[root] = raws[root][:0]
            self._transfer(signature, num_bytes, self._part_bytes, write=self._part_writer(raws))
            self._timing.moved_bytes += sum(raw.numel() for raw in raws)
            return tensors[root].detach().clone(memory_format=torch.contiguous_format)
        result = torch.empty(forms[self._rank].shape, dtype=forms[self._rank].dtype)
        out = result.view(-1).view(torch.uint8)

        def read(start: int, slot: int) -> None:
            _copy(self._part(self._staging[slot][root], self._rank), out[start : start + self._part_bytes])

        self._transfer(signature, num_bytes, self._part_bytes, read=read)
        self._timing.moved_bytes += result.nbytes
        return result

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        signature = Signature("all_to_all", tensors[0].dtype)
        all_forms = self._exchange_forms(signature, tensors)
        raws = [_raw(tensor) for tensor in tensors]
        received = [torch.empty(forms[self._rank].shape, dtype=forms[self._rank].dtype) for forms in all_forms]
        outs = [out.view(-1).view(torch.uint8) for out in received]

        def read(start: int, slot: int) -> None:
            for out, staged in zip(outs, self._staging[slot], strict=True):
                _copy(self._part(staged, self._rank), out[start : start + self._part_bytes])

        num_bytes = max(map(_longest, all_forms))
        self._transfer(signature, num_bytes, self._part_bytes, write=self._part_writer(raws), read=read)
        others = [other for other in range(self._size) if other != self._rank]
        self._timing.moved_bytes += sum(raws[other].numel() + outs[other].numel() for other in others)
        return [out.to(tensor.device) for out, tensor in zip(received, tensors, strict=True)]

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp, reduction: Reduction) -> Tensor:
        """`reduction`: by `op`, of the tensors' dtype.

        Raises:
            TensorMismatch: on every rank: shapes differ between ranks.
        """
        dtype = tensors[0].dtype
        signature = Signature("reduce_scatter", dtype, sum(tensor.numel() for tensor in tensors), op)
        all_forms = self._exchange_forms(signature, tensors)
        for other, forms in enumerate(all_forms):
            if forms != all_forms[0]:
                raise TensorMismatch(
                    f"ranks disagree in reduce_scatter: rank 0 has {_describe(all_forms[0])}, "
                    f"rank {other} has {_describe(forms)}"
                )
        raws = [_raw(tensor) for tensor in tensors]
        result = torch.empty(tensors[self._rank].shape, dtype=dtype)
        out = result.view(-1)
        part_elements = self._part_bytes // dtype.itemsize

        def read(start: int, slot: int) -> None:
            target = out[start // dtype.itemsize :][:part_elements]
            theirs = [self._part(staged, self._rank)[: target.nbytes].view(dtype) for staged in self._staging[slot]]
            reduction(theirs, target)

        num_bytes = max(raw.numel() for raw in raws)
        self._transfer(signature, num_bytes, self._part_bytes, write=self._part_writer(raws), read=read)
        self._timing.moved_bytes += (self._size - 2) * result.nbytes + sum(raw.numel() for raw in raws)
        return result.to(tensors[0].device)

    def close(self) -> None:
        """Let go of the memory."""
        self._staging = []

    def _collect(
        self,
        signature: Signature,
        tensor: Tensor,
        forms: Sequence[TensorForm],
        *,
        write: Callable[[int, int], None] | None = None,
    ) -> list[Tensor]:
        """Every rank's tensor; this rank's own, which is `tensor`, need not be written for it."""
        gathered = [torch.empty(form.shape, dtype=form.dtype) for form in forms]
        gathered[self._rank].copy_(tensor.detach())
        outs = [out.view(-1).view(torch.uint8) for out in gathered]

        def read(start: int, slot: int) -> None:
            for rank, (out, staged) in enumerate(zip(outs, self._staging[slot], strict=True)):
                if rank != self._rank:
                    _copy(staged, out[start : start + self._slot_bytes])

        self._transfer(signature, _longest(forms), self._slot_bytes, write=write, read=read)
        self._timing.moved_bytes += sum(out.numel() for out in outs) - outs[self._rank].numel()
        return [out.to(tensor.device) for out in gathered]

    def _run(self, steps: Sequence[Step]) -> None:
        self._pipeline.submit(steps).wait()

    def _transfer(
        self,
        signature: Signature,
        num_bytes: int,
        piece_bytes: int,
        *,
        write: Callable[[int, int], None] | None = None,
        read: Callable[[int, int], None] | None = None,
    ) -> None:
        """Pass `num_bytes`, the same number on every rank, through the slots; `write` and `read` get start and slot."""
        self._run(
            [
                Transfer(
                    signature,
                    write=None if write is None else functools.partial(write, start),
                    read=None if read is None else functools.partial(read, start),
                )
                for start in range(0, num_bytes, piece_bytes)
            ]
            or [Transfer(signature)]
        )

    def _exchange_forms(self, signature: Signature, tensors: Sequence[Tensor]) -> list[list[TensorForm]]:
        """Dtypes and shapes of every rank's tensors, in rank order."""
        mine = pack_forms(tensors).view(-1).view(torch.uint8)
        all_forms: list[list[TensorForm]] = []

        def write(slot: int) -> None:
            _copy(mine, self._staging[slot][self._rank])

        def read(slot: int) -> None:
            all_forms.extend(_read_forms(staged, len(tensors)) for staged in self._staging[slot])

        self._run([Transfer(signature, write=write, read=read)])
        return all_forms

    def _hear_forms(self, signature: Signature, tensors: Sequence[Tensor] | None, root: int) -> list[TensorForm]:
        """Dtypes and shapes of the root's tensors, one a rank; only the root gives them."""
        all_forms: list[TensorForm] = []

        def write(slot: int) -> None:
            if tensors is not None:
                _copy(pack_forms(tensors).view(-1).view(torch.uint8), self._staging[slot][root])

        def read(slot: int) -> None:
            all_forms.extend(_read_forms(self._staging[slot][root], self._size))

        self._run([Transfer(signature, write=write, read=read)])
        return all_forms

    def _part(self, staged: Tensor, rank: int) -> Tensor:
        return staged[rank * self._part_bytes :][: self._part_bytes]

    def _writer(self, mine: Tensor) -> Callable[[int, int], None]:
        """Puts the next piece of `mine` into this rank's slot."""

        def write(start: int, slot: int) -> None:
            _copy(mine[start : start + self._slot_bytes], self._staging[slot][self._rank])

        return write

    def _part_writer(self, raws: Sequence[Tensor]) -> Callable[[int, int], None]:
        """Puts the next piece for every rank into that rank's part of this rank's slot."""

        def write(start: int, slot: int) -> None:
            for rank, raw in enumerate(raws):
                _copy(raw[start : start + self._part_bytes], self._part(self._staging[slot][self._rank], rank))

        return write


def _raw(tensor: Tensor) -> Tensor:
    return flatten(tensor, device_type="cpu")[0].view(torch.uint8)


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy as much as the shorter of two 1-D tensors holds."""
    length = min(source.numel(), target.numel())
    target[:length].copy_(source[:length])


def _longest(forms: Sequence[TensorForm]) -> int:
    return max((form.num_bytes for form in forms), default=0)


def _read_forms(staged: Tensor, num_tensors: int) -> list[TensorForm]:
    rows = torch.empty(num_tensors, FORM_NUMBERS, dtype=torch.int64)
    _copy(staged, rows.view(-1).view(torch.uint8))
    return unpack_forms(rows)


def _describe(forms: Sequence[TensorForm]) -> str:
    return ", ".join(map(str, forms))
