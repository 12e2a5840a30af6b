"""Operations that move tensors as bytes, once the ranks have told one another dtypes and shapes."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NoReturn, final

import torch
from torch import Tensor

from paceline.comm.arguments import flatten, require_from_root, require_one_each, require_other, require_root
from paceline.comm.base import Collective, ReduceOp, Work
from paceline.comm.reduction import Reduction, require_reducible
from paceline.comm.signature import FORM_NUMBERS, Signature, TensorForm, pack_forms, unpack_forms
from paceline.errors import PacelineError, TensorMismatch


class ByteCollective(Collective):
    """Broadcast, gather, scatter, messages and their like, in terms of operations on 1-D uint8 tensors.

    Tensors on another device than `device` travel by way of it, and have at most 8 dimensions. All ranks take part in
    the first four operations, which compare signatures before anything moves that ranks could disagree on.
    """

    device: torch.device

    @abstractmethod
    def broadcast_bytes(self, signature: Signature, raw: Tensor, root: int) -> None:
        """Overwrite `raw` with the root's, which is as long."""

    @abstractmethod
    def gather_bytes(
        self, signature: Signature, raw: Tensor, lengths: Sequence[int], *, root: int | None
    ) -> list[Tensor] | None:
        """Every rank's bytes, in memory of their own, on the root (None elsewhere) or everywhere if there is no root.

        `lengths`: of every rank's `raw`; each rank passes the same.
        """

    @abstractmethod
    def exchange_bytes(
        self, signature: Signature, outgoing: Sequence[Tensor], lengths: Sequence[int], *, longest: int
    ) -> list[Tensor]:
        """Send the i-th tensor to rank i; return what every rank sent here, in memory of their own.

        `lengths`: of what comes from every rank; `longest`: at least that of anything that any rank sends.
        """

    @abstractmethod
    def reduce_bytes(self, signature: Signature, outgoing: Sequence[Tensor], reduction: Reduction, out: Tensor) -> None:
        """Write to the 1-D `out` the reduction of what all ranks send here; their tensors have the same forms."""

    @abstractmethod
    def send_bytes(self, signature: Signature, raw: Tensor, destination: int) -> Work:
        """Start to send `raw` to one rank, which receives as many with the same signature."""

    @abstractmethod
    def recv_bytes(self, signature: Signature, raw: Tensor, source: int, finish: Callable[[], None] | None) -> Work:
        """Start to fill `raw`; `finish` is called once when that is done."""

    @abstractmethod
    def fail(self, error: PacelineError) -> NoReturn:
        """Refuse everything from now on, tell the other ranks, and raise."""

    @final
    def broadcast(self, tensor: Tensor, *, root: int = 0) -> None:
        require_root(root, size=self.size)
        flat, copy_back = flatten(tensor, device_type=self.device.type, is_target=True)
        signature = Signature("broadcast", tensor.dtype, tensor.numel(), root=root)
        self.broadcast_bytes(signature, flat.view(torch.uint8), root)
        if copy_back is not None:
            copy_back()

    @final
    def gather(self, tensor: Tensor, *, root: int = 0) -> list[Tensor] | None:
        require_root(root, size=self.size)
        return self._gather(Signature("gather", tensor.dtype, root=root), tensor, root)

    @final
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = self._gather(Signature("all_gather", tensor.dtype), tensor, None)
        assert gathered is not None  # without a root every rank gets it
        return gathered

    @final
    def scatter(self, tensors: Sequence[Tensor] | None, *, root: int = 0) -> Tensor:
        """As `Collective.scatter`; elsewhere than on the root the result is on the collective's device."""
        require_from_root(tensors, root=root, rank=self.rank, size=self.size)
        signature = Signature("scatter", root=root)
        rows = torch.zeros(self.size, FORM_NUMBERS, dtype=torch.int64) if tensors is None else pack_forms(tensors)
        rows = rows.to(self.device)
        self.broadcast_bytes(signature, rows.view(-1).view(torch.uint8), root)
        forms = unpack_forms(rows)
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        outgoing = [nothing] * self.size if tensors is None else [self._raw(tensor) for tensor in tensors]
        lengths = [forms[self.rank].num_bytes if source == root else 0 for source in range(self.size)]
        received = self.exchange_bytes(signature, outgoing, lengths, longest=_longest(forms))
        result = forms[self.rank].view(received[root])
        return result if tensors is None else result.to(tensors[root].device)

    @final
    def reduce_scatter(self, tensors: Sequence[Tensor], *, op: ReduceOp = "sum") -> Tensor:
        require_one_each(tensors, size=self.size)
        dtype = tensors[0].dtype
        require_reducible(op, dtype)
        signature = Signature("reduce_scatter", dtype, sum(tensor.numel() for tensor in tensors), op)
        all_forms = self._tell_forms(signature, tensors)
        for rank, forms in enumerate(all_forms):
            if forms != all_forms[0]:
                self.fail(_mismatch(signature, all_forms[0], rank, forms))
        result = torch.empty(tensors[self.rank].shape, dtype=dtype, device=self.device)
        self.reduce_bytes(signature, [self._raw(tensor) for tensor in tensors], Reduction(op, dtype), result.view(-1))
        return result.to(tensors[0].device)

    @final
    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        require_one_each(tensors, size=self.size)
        signature = Signature("all_to_all", tensors[0].dtype)
        all_forms = self._tell_forms(signature, tensors)
        incoming = [forms[self.rank] for forms in all_forms]
        received = self.exchange_bytes(
            signature,
            [self._raw(tensor) for tensor in tensors],
            [form.num_bytes for form in incoming],
            longest=max(map(_longest, all_forms)),
        )
        return [form.view(raw).to(tensor.device) for form, raw, tensor in zip(incoming, received, tensors, strict=True)]

    @final
    def send(self, tensor: Tensor, *, destination: int) -> Work:
        """As `Collective.send`. Never blocks."""
        require_other(destination, rank=self.rank, size=self.size)
        return self.send_bytes(_message(tensor), self._raw(tensor), destination)

    @final
    def recv(self, tensor: Tensor, *, source: int) -> Work:
        """As `Collective.recv`. Never blocks; the tensor must not be touched until the work is over. Over shared memory
        the work raises TensorMismatch if the source sends something of another dtype or size."""
        require_other(source, rank=self.rank, size=self.size)
        flat, copy_back = flatten(tensor, device_type=self.device.type, is_target=True)
        return self.recv_bytes(_message(tensor), flat.view(torch.uint8), source, copy_back)

    def _gather(self, signature: Signature, tensor: Tensor, root: int | None) -> list[Tensor] | None:
        forms = [theirs[0] for theirs in self._tell_forms(signature, [tensor])]
        raws = self.gather_bytes(signature, self._raw(tensor), [form.num_bytes for form in forms], root=root)
        if raws is None:
            return None
        return [form.view(raw).to(tensor.device) for form, raw in zip(forms, raws, strict=True)]

    def _tell_forms(self, signature: Signature, tensors: Sequence[Tensor]) -> list[list[TensorForm]]:
        """Dtypes and shapes of every rank's tensors, in rank order, all of the signature's dtype."""
        mine = pack_forms(tensors)
        raw = mine.to(self.device).view(-1).view(torch.uint8)
        told = self.gather_bytes(signature, raw, [raw.numel()] * self.size, root=None)
        assert told is not None  # without a root every rank gets it
        all_forms = [unpack_forms(theirs.view(torch.int64).view(mine.shape)) for theirs in told]
        for rank, forms in enumerate(all_forms):
            if any(form.dtype != all_forms[0][0].dtype for form in forms):
                self.fail(_mismatch(signature, all_forms[0], rank, forms))
        return all_forms

    def _raw(self, tensor: Tensor) -> Tensor:
        return flatten(tensor, device_type=self.device.type)[0].view(torch.uint8)


def _message(tensor: Tensor) -> Signature:
    return Signature("message", tensor.dtype, tensor.numel())


def _longest(forms: Sequence[TensorForm]) -> int:
    return max(form.num_bytes for form in forms)


def _mismatch(
    signature: Signature, first: Sequence[TensorForm], rank: int, other: Sequence[TensorForm]
) -> TensorMismatch:
    mine, theirs = (", ".join(map(str, forms)) for forms in (first, other))
    return TensorMismatch(f"ranks disagree in {signature.operation}: rank 0 has {mine}, rank {rank} has {theirs}")
