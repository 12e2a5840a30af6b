"""Collectives among the processes of one Linux host, through memory that all of them map."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.comm.arguments import flatten, pieces, require_one_each, require_other, require_root
from paceline.comm.base import Collective, ReduceOp, Timing, Work
from paceline.comm.reduction import require_reducible
from paceline.comm.segment import Segment, SegmentAddress
from paceline.comm.shared_memory_mailbox import BOX_BYTES, Mailbox
from paceline.comm.shared_memory_pipeline import NUM_SLOTS, Pipeline, Step
from paceline.comm.shared_memory_plans import ReductionPlans
from paceline.comm.shared_memory_rendezvous import PAGE_BYTES, Rendezvous
from paceline.comm.shared_memory_steps import Transfer
from paceline.comm.signature import Signature, TensorForm, pack_forms, unpack_forms
from paceline.errors import Aborted, PacelineError, TensorMismatch, UsageError

SLOT_BYTES = 2**20
_CONTROL_BYTES = PAGE_BYTES + NUM_SLOTS * SLOT_BYTES
_CACHE_LINE_BYTES = 64


@final
class SharedMemoryCollective(Collective):
    """Ranks are processes of one host; data moves through shared memory, and waits are futex waits.

    Tensors in memory from `allocate` are reduced where they lie: each rank reduces its share over all ranks' memory
    (a reduce-scatter and an all-gather by direct access). All others pass through staging slots, in pieces. Small
    tensors are always staged, and every rank reduces all of them, which needs one meeting instead of two.

    A tensor in allocated memory must lie at the same offset on every rank. Only CPU tensors are taken, of at most 8
    dimensions. One thread at a time may use a collective, except for `abort`. Work advances only within calls of its
    rank: whoever has started one should poll it now and then, or wait.

    Every call checks that all ranks asked for the same; after any error in that or in a peer, every later call raises.
    """

    @staticmethod
    def prepare() -> Segment:
        """This rank's own memory. Its `address` goes to every rank, which then builds the collective with all of them.

        Raises:
            OSError: there is no descriptor or no address space left.
        """
        control = Segment.create(_CONTROL_BYTES)
        Rendezvous.prepare(control)
        return control

    def __init__(
        self, *, rank: int, addresses: Sequence[SegmentAddress], control: Segment, deadline_s: float | None = 300.0
    ) -> None:
        """Meet the other ranks. Collective call; owns `control` from here on.

        Args:
            addresses: of what every rank got from `prepare`, in rank order.
            control: what this rank got from `prepare`.
            deadline_s: the longest wait at any one meeting of the ranks; None for ever.

        Raises:
            UsageError: the addresses do not fit the rank.
            PeerLost: another rank's process is gone, or its memory cannot be opened.
            DeadlineExceeded: another rank did not come.
        """
        if not 0 <= rank < len(addresses) or addresses[rank] != control.address:
            raise UsageError(
                f"rank {rank} of {len(addresses)} must find its own control segment at its place in addresses"
            )
        self.rank = rank
        self.size = len(addresses)
        self.timing = Timing()
        self._rendezvous = Rendezvous(
            rank=rank, addresses=addresses, control=control, deadline_s=deadline_s, timing=self.timing
        )
        self._pipeline = Pipeline(self._rendezvous, self.timing)
        segments = [peer.segment for peer in self._rendezvous.peers.values()]
        segments.insert(rank, control)
        self._staging = [  # [slot][rank]
            [segment.tensor[PAGE_BYTES + slot * SLOT_BYTES :][:SLOT_BYTES] for segment in segments]
            for slot in range(NUM_SLOTS)
        ]
        self._plans = ReductionPlans(self._staging, rank)
        try:
            self.barrier()
            control.close_descriptor()
            boxes = Segment.create(self.size * BOX_BYTES)
            Mailbox.prepare(boxes, self.size)
            self._mailbox = Mailbox(self._rendezvous, self._pipeline, self._share(boxes), self.timing)
        except BaseException:
            self._release()
            raise
        self._pipeline.advance_messages = self._mailbox.advance

    def allocate(self, num_bytes: int) -> Tensor:
        """A zeroed uint8 tensor of shape (num_bytes,) that every rank maps. It stays mapped until `close`.

        Raises:
            TensorMismatch: ranks ask for different sizes.
            ValueError: `num_bytes` is not positive.
            OSError: there is no descriptor or no address space left, here.
            PeerLost, DeadlineExceeded, Aborted: as every operation.
        """
        self._rendezvous.check()
        segments = self._share(Segment.create(num_bytes))
        self._plans.add(segments)
        return segments[self.rank].tensor

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        """As `Collective.all_reduce`. Never blocks; the tensor must not be touched until the work is over.

        Raises:
            TypeError: the tensor is not dense, or its dtype cannot be reduced so.
            TensorMismatch: from the work, on every rank: ranks disagree on operation, dtype, size or place.
        """
        require_reducible(op, tensor.dtype)
        flat, copy_back = flatten(tensor, device_type="cpu", is_target=True)
        steps = self._plans.steps(flat, op)
        steps[-1].finish = copy_back
        return self._pipeline.submit(steps)

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> None:
        require_root(root, size=self.size)
        flat, copy_back = flatten(tensor, device_type="cpu", is_target=True)
        raw = flat.view(torch.uint8)
        signature = Signature("broadcast", tensor.dtype, tensor.numel(), root=root)

        def write(piece: Tensor, slot: int) -> None:
            self._staging[slot][root][: piece.numel()].copy_(piece)

        def read(piece: Tensor, slot: int) -> None:
            piece.copy_(self._staging[slot][root][: piece.numel()])

        def step(piece: Tensor) -> Step:
            if self.rank == root:
                return Transfer(signature, write=functools.partial(write, piece), moved_bytes=piece.numel())
            return Transfer(signature, read=functools.partial(read, piece), moved_bytes=piece.numel())

        self._run([step(piece) for piece in pieces(raw, SLOT_BYTES)])
        if copy_back is not None:
            copy_back()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        flat, _ = flatten(tensor, device_type="cpu")
        signature = Signature("all_gather", tensor.dtype)
        forms = [theirs[0] for theirs in self._exchange_forms(signature, [tensor])]
        gathered = [torch.empty(form.shape, dtype=form.dtype) for form in forms]
        mine = flat.view(torch.uint8)
        outs = [out.view(-1).view(torch.uint8) for out in gathered]

        def write(start: int, slot: int) -> None:
            _copy(mine[start : start + SLOT_BYTES], self._staging[slot][self.rank])

        def read(start: int, slot: int) -> None:
            for out, staged in zip(outs, self._staging[slot], strict=True):
                _copy(staged, out[start : start + SLOT_BYTES])

        self._transfer(signature, max(out.numel() for out in outs), SLOT_BYTES, write, read)
        self.timing.moved_bytes += sum(out.numel() for out in outs) - mine.numel()
        return [out.to(tensor.device) for out in gathered]

    def reduce_scatter(self, tensors: Sequence[Tensor], *, op: ReduceOp = "sum") -> Tensor:
        require_one_each(tensors, size=self.size)
        dtype = tensors[0].dtype
        require_reducible(op, dtype)
        signature = Signature("reduce_scatter", dtype, sum(tensor.numel() for tensor in tensors), op)
        all_forms = self._exchange_forms(signature, tensors)
        for other, forms in enumerate(all_forms):
            if forms != all_forms[0]:
                self._rendezvous.fail(
                    TensorMismatch(
                        f"ranks disagree in reduce_scatter: rank 0 has {_describe(all_forms[0])}, "
                        f"rank {other} has {_describe(forms)}"
                    )
                )
        flats = [flatten(tensor, device_type="cpu")[0].view(torch.uint8) for tensor in tensors]
        result = torch.empty(tensors[self.rank].shape, dtype=dtype)
        out = result.view(-1)
        reduction = self._plans.reduction(op, dtype)
        part_bytes = self._part_bytes()
        part_elements = part_bytes // dtype.itemsize

        def read(start: int, slot: int) -> None:
            target = out[start // dtype.itemsize :][:part_elements]
            theirs = [self._part(staged, self.rank)[: target.nbytes].view(dtype) for staged in self._staging[slot]]
            reduction(theirs, target)

        self._transfer(signature, max(raw.numel() for raw in flats), part_bytes, self._write_parts(flats), read)
        self.timing.moved_bytes += (self.size - 1) * result.nbytes + sum(raw.numel() for raw in flats) - result.nbytes
        return result.to(tensors[0].device)

    def send(self, tensor: Tensor, *, destination: int) -> Work:
        """As `Collective.send`. Never blocks; large tensors travel in pieces as the receiver takes them."""
        require_other(destination, rank=self.rank, size=self.size)
        flat, _ = flatten(tensor, device_type="cpu")
        return self._mailbox.send(flat.view(torch.uint8), destination, _message(tensor))

    def recv(self, tensor: Tensor, *, source: int) -> None:
        require_other(source, rank=self.rank, size=self.size)
        flat, copy_back = flatten(tensor, device_type="cpu", is_target=True)
        self._mailbox.recv(flat.view(torch.uint8), source, _message(tensor))
        if copy_back is not None:
            copy_back()

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        require_one_each(tensors, size=self.size)
        signature = Signature("all_to_all", tensors[0].dtype)
        all_forms = self._exchange_forms(signature, tensors)
        flats = [flatten(tensor, device_type="cpu")[0].view(torch.uint8) for tensor in tensors]
        received = [torch.empty(forms[self.rank].shape, dtype=forms[self.rank].dtype) for forms in all_forms]
        outs = [out.view(-1).view(torch.uint8) for out in received]
        part_bytes = self._part_bytes()

        def read(start: int, slot: int) -> None:
            for out, staged in zip(outs, self._staging[slot], strict=True):
                _copy(self._part(staged, self.rank), out[start : start + part_bytes])

        num_bytes = max(form.num_bytes for forms in all_forms for form in forms)
        self._transfer(signature, num_bytes, part_bytes, self._write_parts(flats), read)
        others = [other for other in range(self.size) if other != self.rank]
        self.timing.moved_bytes += sum(flats[other].numel() + outs[other].numel() for other in others)
        return [out.to(tensor.device) for out, tensor in zip(received, tensors, strict=True)]

    def barrier(self) -> None:
        self._run([Transfer(Signature("barrier"))])

    def set_deadline(self, deadline_s: float | None) -> None:
        self._rendezvous.deadline_s = deadline_s

    def abort(self, reason: str) -> None:
        self._rendezvous.leave(Aborted(reason))

    def close(self) -> None:
        """Leave. Peers that still wait for this rank raise `PeerLost`; allocated tensors stay readable here.

        What is under way is given up, a sent tensor included if its work has not been waited for.
        """
        self._release()
        self._mailbox.close()

    def _release(self) -> None:
        self._rendezvous.close()
        self._pipeline.close()
        self._plans.close()
        self._staging = []

    def _share(self, mine: Segment) -> tuple[Segment, ...]:
        """Every rank's segment, in rank order; collective call, given this rank's."""
        address = mine.address
        try:
            rows = self.all_gather(torch.tensor([address.pid, address.fd, address.num_bytes]))
            addresses = [SegmentAddress(*row.tolist()) for row in rows]
            for rank, theirs in enumerate(addresses):
                if theirs.num_bytes != addresses[0].num_bytes:
                    raise TensorMismatch(
                        f"ranks allocate different sizes: rank 0 {addresses[0].num_bytes} bytes, "
                        f"rank {rank} {theirs.num_bytes} bytes"
                    )
            segments = tuple(mine if theirs == address else Segment.open(theirs) for theirs in addresses)
            self.barrier()
        except BaseException as error:
            reason = error if isinstance(error, PacelineError) else Aborted(f"allocation failed: {error!r}")
            self._rendezvous.leave(reason)
            raise
        finally:
            mine.close_descriptor()
        return segments

    def _run(self, steps: Sequence[Step]) -> None:
        self._pipeline.submit(steps).wait()

    def _transfer(
        self,
        signature: Signature,
        num_bytes: int,
        piece_bytes: int,
        write: Callable[[int, int], None],
        read: Callable[[int, int], None],
    ) -> None:
        """Pass `num_bytes`, the most that any rank has, through the slots; `write` and `read` get start and slot."""
        self._run(
            [
                Transfer(signature, write=functools.partial(write, start), read=functools.partial(read, start))
                for start in range(0, num_bytes, piece_bytes)
            ]
            or [Transfer(signature)]
        )

    def _exchange_forms(self, signature: Signature, tensors: Sequence[Tensor]) -> list[list[TensorForm]]:
        """Dtypes and shapes of every rank's tensors, in rank order."""
        mine = pack_forms(tensors).view(-1).view(torch.uint8)
        all_forms: list[list[TensorForm]] = []

        def write(slot: int) -> None:
            _copy(mine, self._staging[slot][self.rank])

        def read(slot: int) -> None:
            for staged in self._staging[slot]:
                rows = staged[: mine.numel()].view(torch.int64).view(len(tensors), -1)
                all_forms.append(unpack_forms(rows))

        self._run([Transfer(signature, write=write, read=read)])
        return all_forms

    def _part_bytes(self) -> int:
        """Size of the part of a slot that is meant for one rank."""
        return SLOT_BYTES // self.size // _CACHE_LINE_BYTES * _CACHE_LINE_BYTES

    def _part(self, staged: Tensor, rank: int) -> Tensor:
        return staged[rank * self._part_bytes() :][: self._part_bytes()]

    def _write_parts(self, flats: Sequence[Tensor]) -> Callable[[int, int], None]:
        """Puts the next piece for every rank into that rank's part of the slot."""

        def write(start: int, slot: int) -> None:
            for rank, raw in enumerate(flats):
                _copy(raw[start : start + self._part_bytes()], self._part(self._staging[slot][self.rank], rank))

        return write


def _message(tensor: Tensor) -> Signature:
    return Signature("message", tensor.dtype, tensor.numel())


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy as much as the shorter of two 1-D tensors holds."""
    length = min(source.numel(), target.numel())
    target[:length].copy_(source[:length])


def _describe(forms: Sequence[TensorForm]) -> str:
    return ", ".join(map(str, forms))
