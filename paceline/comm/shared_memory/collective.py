"""Collectives among the processes of one Linux host, through memory that all of them map."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, final

import torch
from torch import Tensor

from paceline.comm.arguments import flatten
from paceline.comm.base import ReduceOp, Timing, Work
from paceline.comm.byte_collective import ByteCollective
from paceline.comm.reduction import Reduction, require_reducible
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock, exchange_blocks
from paceline.comm.shared_memory.mailbox import BOX_BYTES, Mailbox
from paceline.comm.shared_memory.pipeline import NUM_SLOTS, Pipeline
from paceline.comm.shared_memory.plans import ReductionPlans
from paceline.comm.shared_memory.rendezvous import PAGE_BYTES, Rendezvous
from paceline.comm.shared_memory.transfers import Transfers
from paceline.comm.signature import Signature
from paceline.errors import Aborted, PacelineError, UsageError

SLOT_BYTES = 2**20
_CONTROL_BYTES = PAGE_BYTES + NUM_SLOTS * SLOT_BYTES


@final
class SharedMemoryCollective(ByteCollective):
    """Ranks are processes of one host; data moves through shared memory, and waits are futex waits.

    Tensors in memory from `allocate` are reduced where they lie: each rank reduces its share over all ranks' memory
    (a reduce-scatter and an all-gather by direct access). All others pass through staging slots, in pieces. Small
    tensors are always staged, and every rank reduces all of them, which needs one meeting instead of two.

    A tensor in allocated memory must lie at the same offset on every rank. Only CPU tensors are taken, of at most 8
    dimensions. One thread at a time may use a collective, except for `abort`. Work advances only within calls of its
    rank: whoever has started one should poll it now and then, or wait.

    Every call checks that all ranks asked for the same; after any error in that or in a peer, every later call raises.
    """

    completes_alike = True

    @staticmethod
    def prepare() -> SharedBlock:
        """This rank's own memory, whose `address` every rank needs to build the collective. Raises OSError if there is
        no descriptor or no address space left."""
        control = SharedBlock.create(_CONTROL_BYTES)
        Rendezvous.prepare(control)
        return control

    def __init__(
        self,
        *,
        rank: int,
        addresses: Sequence[BlockAddress],
        control: SharedBlock,
        deadline_s: float | None = 300.0,
        timing: Timing | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        """Meet the other ranks. Collective call; owns `control` from here on.

        Args:
            addresses: of what every rank got from `prepare`, in rank order.
            control: what this rank got from `prepare`.
            deadline_s: the longest wait at any one meeting of the ranks; None for ever.
            timing: where to go on counting, for ranks that had another collective before.
            names: what errors call the ranks, where that is not their numbers here.

        Raises:
            UsageError: the addresses do not fit the rank.
            PeerLost: another rank's process is gone, or its memory cannot be opened.
            DeadlineExceeded: another rank did not come.
        """
        if not 0 <= rank < len(addresses) or addresses[rank] != control.address:
            raise UsageError(
                f"rank {rank} of {len(addresses)} must find its own control block at its place in addresses"
            )
        self.rank = rank
        self.size = len(addresses)
        self.device = torch.device("cpu")
        self.timing = timing or Timing()
        self._rendezvous = Rendezvous(
            rank=rank, addresses=addresses, control=control, deadline_s=deadline_s, timing=self.timing, names=names
        )
        self._pipeline = Pipeline(self._rendezvous, self.timing)
        blocks = [peer.block for peer in self._rendezvous.peers.values()]
        blocks.insert(rank, control)
        staging = [  # [slot][rank]
            [block.tensor[PAGE_BYTES + slot * SLOT_BYTES :][:SLOT_BYTES] for block in blocks]
            for slot in range(NUM_SLOTS)
        ]
        self._plans = ReductionPlans(staging, rank)
        self._transfers = Transfers(self._pipeline, staging, rank, self.timing)
        try:
            self.barrier()
            control.close_descriptor()
            boxes = SharedBlock.create(self.size * BOX_BYTES)
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
        blocks = self._share(SharedBlock.create(num_bytes))
        self._plans.add(blocks)
        return blocks[self.rank].tensor

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

    def persistent_all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Callable[[], Work]:
        require_reducible(op, tensor.dtype)
        flat, copy_back = flatten(tensor, device_type="cpu", is_target=True)
        if copy_back is not None:
            return partial(self.all_reduce, tensor, op=op)
        # Right after a training step, whose code is in no cache, this saves 25 us of looking up.
        return partial(self._pipeline.submit, self._plans.steps(flat, op))

    def watched_mean(self, tensor: Tensor) -> Callable[[], Work] | None:
        if not tensor.is_floating_point() or not tensor.is_contiguous():
            return None
        flat, copy_back = flatten(tensor, device_type="cpu", is_target=True)
        if copy_back is not None:  # of a tensor on a GPU, which `flat` is a copy of
            return None
        return partial(self._pipeline.submit, self._plans.steps(flat, "mean", is_watched=True))

    def broadcast_bytes(self, signature: Signature, raw: Tensor, root: int) -> None:
        self._transfers.broadcast(signature, raw, root)

    def gather_bytes(
        self, signature: Signature, raw: Tensor, lengths: Sequence[int], *, root: int | None
    ) -> list[Tensor] | None:
        return self._transfers.gather(signature, raw, lengths, root=root)

    def exchange_bytes(
        self, signature: Signature, outgoing: Sequence[Tensor], lengths: Sequence[int], *, longest: int
    ) -> list[Tensor]:
        return self._transfers.exchange(signature, outgoing, lengths, longest=longest)

    def reduce_bytes(self, signature: Signature, outgoing: Sequence[Tensor], reduction: Reduction, out: Tensor) -> None:
        self._transfers.reduce(signature, outgoing, reduction, out)

    def fail(self, error: PacelineError) -> NoReturn:
        self._rendezvous.fail(error)

    def send_bytes(self, signature: Signature, raw: Tensor, destination: int) -> Work:
        return self._mailbox.send(raw, destination, signature)

    def recv_bytes(self, signature: Signature, raw: Tensor, source: int, finish: Callable[[], None] | None) -> Work:
        return self._mailbox.recv(raw, source, signature, finish)

    def barrier(self) -> None:
        self._transfers.barrier()

    def standing(self) -> str | None:
        return self._rendezvous.standing(issued=self._pipeline.issued)

    def be_through(self) -> None:
        self._rendezvous.be_through()

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
        self._transfers.close()

    def _share(self, mine: SharedBlock) -> list[SharedBlock]:
        """Every rank's block, in rank order; collective call, given this rank's."""
        try:
            return exchange_blocks(mine, self.all_gather, self.barrier)
        except BaseException as error:
            reason = error if isinstance(error, PacelineError) else Aborted(f"allocation failed: {error!r}")
            self._rendezvous.leave(reason)
            raise
