"""Collectives over torch.distributed: gloo between hosts, NCCL between GPUs."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Store

from paceline.comm.arguments import (
    flatten,
    require_from_root,
    require_one_each,
    require_other,
    require_root,
    timeout_of,
)
from paceline.comm.base import Collective, ReduceOp, Timing, Work
from paceline.comm.process_group.calls import TorchCalls
from paceline.comm.process_group.gloo_messages import MessageWay
from paceline.comm.process_group.network_interface import interface_with, nccl_interface
from paceline.comm.process_group.peer_watch import PeerWatch
from paceline.comm.process_group.reducing import from_wire, options_for, to_wire
from paceline.comm.reduction import Reduction, require_reducible
from paceline.comm.signature import FORM_NUMBERS, Signature, TensorForm, pack_forms, unpack_forms
from paceline.errors import Aborted, DeadlineExceeded, PacelineError, PeerLost, TensorMismatch

# A backend that times out closes its connections, and peers would blame whoever was first, not whoever is missing.
_BACKEND_MARGIN_S = 10.0
# What goes to a rank that is sent nothing.
_NOTHING = torch.empty(0, dtype=torch.uint8)
_NO_FORM = TensorForm(torch.uint8, (0,))


@final
class TorchCollective(Collective):
    """Operations of a torch.distributed process group, gloo or NCCL, under Paceline's rules.

    All blocked time counts as communication: the backends do not tell it from waiting. `wait` blocks this thread until
    the result is in place, with NCCL too, so that every wait has a deadline. After any error every later call raises.

    Given an address, errors name the rank that is lost, missing or disagrees. Ranks that disagree on operation, root,
    dtype or size find out the first time that a rank asks for that; between operations that were all agreed on before,
    a disagreement in `all_reduce` still ends gloo's processes, as gloo does. To compare every time would cost a
    12 KB all-reduce about as much again as it takes. Sizes and dtypes are compared in every call of the other
    operations. A message of another dtype or size than its receiver awaits never arrives over gloo, and NCCL does with
    it what it likes.

    Over NCCL, messages between two ranks are passed in the order of the calls, both ways together: of two ranks that
    exchange large tensors one must receive first.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device | None = None,
        address: str | None = None,
        deadline_s: float | None = 300.0,
    ) -> None:
        """Take over a process group. Collective call if there is an address.

        Args:
            group: one of gloo or NCCL; `close` shuts it down.
            device: where this rank's tensors are; None for the CPU with gloo and the current CUDA device with NCCL.
            address: IP address of this host on which the other ranks reach it; on every rank or on none.
            deadline_s: the longest that any one call may wait; None for ever. The group's own timeout is set
                a little longer.

        Raises:
            DeadlineExceeded, PeerLost: another rank did not come.
            OSError: another rank's address cannot be reached.
        """
        self.rank = group.rank()
        self.size = group.size()
        self.timing = Timing()
        # Any: a process group and a bare backend take the same calls, which their stubs tell of neither.
        self._group: Any = group
        self._is_closed = False
        self._is_nccl = group.name().lower() == "nccl"
        self.can_receive_first = not self._is_nccl
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if self._is_nccl else torch.device("cpu")
        self._device = device
        self._calls = TorchCalls(timing=self.timing, deadline_s=deadline_s, is_nccl=self._is_nccl)
        self._ways: dict[str, MessageWay] = {}
        if address is not None:
            self._calls.watch(
                PeerWatch.meet(self._exchange_addresses, rank=self.rank, address=address, deadline_s=deadline_s)
            )
        self.set_deadline(deadline_s)

    def allocate(self, num_bytes: int) -> Tensor:
        """As `Collective.allocate`; plain memory, on this rank's GPU with NCCL."""
        self._calls.check()
        if num_bytes <= 0:
            raise ValueError(f"an allocation needs at least one byte, not {num_bytes}")
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        """As `Collective.all_reduce`.

        Raises:
            TypeError: the dtype cannot be reduced, or the tensor is not on the backend's device.
        """
        require_reducible(op, tensor.dtype)
        self._require_device(tensor)
        tensor = tensor.detach()
        wire = to_wire(tensor, op)
        options = options_for(op, tensor.dtype)
        finish = functools.partial(from_wire, wire, tensor, op, size=self.size)
        num_bytes = 2 * (self.size - 1) * wire.nbytes // self.size
        return self._calls.submit(
            _all_reduce_of(op, tensor.dtype, tensor.numel()),
            lambda: self._group.allreduce([wire], options),
            num_bytes=num_bytes,
            finish=finish,
            must_agree=True,
        )

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> None:
        require_root(root, size=self.size)
        self._require_agreement(f"broadcast from rank {root}", [tensor])
        flat, copy_back = flatten(tensor, device_type=self._device.type, is_target=True)
        raw = flat.view(torch.uint8)
        self._run("broadcast", lambda: self._group.broadcast([raw], _broadcast_options(root)), raw.numel())
        if copy_back is not None:
            copy_back()

    def gather(self, tensor: Tensor, *, root: int = 0) -> list[Tensor] | None:
        """As `Collective.gather`; an all-to-all in which only the root is sent anything."""
        require_root(root, size=self.size)
        forms = [theirs[0] for theirs in self._exchange_forms(f"gather to rank {root}", [tensor])]
        outgoing = [_NOTHING] * self.size
        outgoing[root] = tensor
        if self.rank != root:
            self._exchange_raw("gather", outgoing, [_NO_FORM] * self.size)
            return None
        return self._exchange_raw("gather", outgoing, forms)

    def scatter(self, tensors: Sequence[Tensor] | None, *, root: int = 0) -> Tensor:
        """As `Collective.scatter`; an all-to-all in which only the root sends anything."""
        require_from_root(tensors, root=root, rank=self.rank, size=self.size)
        for tensor in tensors or ():
            self._require_device(tensor)
        incoming = [_NO_FORM] * self.size
        incoming[root] = self._hear_forms(f"scatter from rank {root}", tensors, root)[self.rank]
        return self._exchange_raw("scatter", tensors or [_NOTHING] * self.size, incoming)[root]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """As `Collective.all_gather`; a tensor from another device travels by way of the backend's."""
        here = tensor.to(self._device)
        forms = [theirs[0] for theirs in self._exchange_forms("all_gather", [here])]
        raw = flatten(here, device_type=self._device.type)[0].view(torch.uint8)
        pieces = self._gather_raw("all_gather", raw, [form.num_bytes for form in forms])
        return [
            piece.view(form.dtype).view(form.shape).to(tensor.device) for piece, form in zip(pieces, forms, strict=True)
        ]

    def reduce_scatter(self, tensors: Sequence[Tensor], *, op: ReduceOp = "sum") -> Tensor:
        """As `Collective.reduce_scatter`; an all-to-all, then a reduction in rank order on this rank."""
        require_one_each(tensors, size=self.size)
        for tensor in tensors:
            require_reducible(op, tensor.dtype)
        forms = self._require_agreement("reduce_scatter", tensors)
        received = self._exchange_raw("reduce_scatter", tensors, [forms[self.rank]] * self.size)
        result = torch.empty_like(received[0])
        Reduction(op, result.dtype)([part.view(-1) for part in received], result.view(-1))
        return result

    def send(self, tensor: Tensor, *, destination: int) -> Work:
        require_other(destination, rank=self.rank, size=self.size)
        raw = flatten(tensor, device_type=self._device.type)[0].view(torch.uint8)
        tag = _tag(tensor)
        return self._message("send to", destination, tensor, lambda: self._group.send([raw], destination, tag))

    def recv(self, tensor: Tensor, *, source: int) -> Work:
        require_other(source, rank=self.rank, size=self.size)
        flat, copy_back = flatten(tensor, device_type=self._device.type, is_target=True)
        raw = flat.view(torch.uint8)
        tag = _tag(tensor)
        return self._message("recv from", source, tensor, lambda: self._group.recv([raw], source, tag), copy_back)

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        require_one_each(tensors, size=self.size)
        forms = [theirs[self.rank] for theirs in self._exchange_forms("all_to_all", tensors)]
        return self._exchange_raw("all_to_all", tensors, forms)

    def barrier(self) -> None:
        one = torch.zeros(1, device=self._device)
        self._run("barrier", lambda: self._group.allreduce([one], dist.AllreduceOptions()), 0, must_agree=True)

    def set_deadline(self, deadline_s: float | None) -> None:
        self._calls.deadline_s = deadline_s
        if hasattr(self._group, "_set_default_timeout"):
            margin_s = None if deadline_s is None else deadline_s + _BACKEND_MARGIN_S
            self._group._set_default_timeout(timeout_of(margin_s))

    def abort(self, reason: str) -> None:
        self._calls.leave(Aborted(reason))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._calls.close()
            for way in self._ways.values():
                way.close()
            self._group.shutdown()
            self._group = None

    def _run(self, operation: str, start: Callable[[], Any], num_bytes: int, *, must_agree: bool = False) -> None:
        self._calls.submit(operation, start, num_bytes=num_bytes, must_agree=must_agree).wait()

    def _message(
        self,
        way: str,
        other: int,
        tensor: Tensor,
        start: Callable[[], Any],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        operation = f"{way} rank {other} of {Signature('message', tensor.dtype, tensor.numel())}"
        return self._calls.submit_message(
            operation,
            lambda: self._watched(start(), f"{way} {other}"),
            peer=other,
            num_bytes=tensor.nbytes,
            finish=finish,
        )

    def _watched(self, work: Any, way: str) -> Any:
        """A message's work as one that can be asked whether it is over, in the order of the messages on this way."""
        if self._is_nccl:
            return work
        if way not in self._ways:
            self._ways[way] = MessageWay()
        return self._ways[way].add(work)

    def _exchange_addresses(self, mine: bytes) -> list[bytes]:
        raw = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._device)
        gathered = self._gather_raw("the exchange of addresses", raw, [len(mine)] * self.size)
        return [theirs.cpu().numpy().tobytes() for theirs in gathered]

    def _gather_raw(
        self, operation: str, raw: Tensor, lengths: Sequence[int], *, must_agree: bool = False
    ) -> list[Tensor]:
        """Every rank's bytes, given how many each has."""
        longest = max(lengths)
        if longest == 0:
            return [raw.clone() for _ in lengths]
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: raw.numel()].copy_(raw)
        gathered = [torch.empty_like(padded) for _ in lengths]
        num_bytes = longest * (self.size - 1)
        self._run(
            operation,
            lambda: self._group.allgather([gathered], [padded], AllgatherOptions()),
            num_bytes,
            must_agree=must_agree,
        )
        return [theirs[:length] for theirs, length in zip(gathered, lengths, strict=True)]

    def _exchange_raw(self, operation: str, tensors: Sequence[Tensor], forms: Sequence[TensorForm]) -> list[Tensor]:
        """Send the i-th tensor to rank i and return what all sent here, of the given forms."""
        outgoing = torch.cat(
            [flatten(tensor, device_type=self._device.type)[0].view(torch.uint8) for tensor in tensors]
        )
        sent = [tensor.nbytes for tensor in tensors]
        received = [form.num_bytes for form in forms]
        incoming = torch.empty(sum(received), dtype=torch.uint8, device=self._device)
        self._run(
            operation,
            lambda: self._group.alltoall_base(incoming, outgoing, received, sent, dist.AllToAllOptions()),
            sum(sent) + sum(received) - sent[self.rank] - received[self.rank],
        )
        # A copy each: a part of `incoming` need not be aligned for its dtype.
        return [
            part.clone().view(form.dtype).view(form.shape)
            for part, form in zip(torch.split_with_sizes(incoming, received), forms, strict=True)
        ]

    def _exchange_forms(self, operation: str, tensors: Sequence[Tensor]) -> list[list[TensorForm]]:
        """Dtypes and shapes of every rank's tensors, in rank order."""
        for tensor in tensors:
            self._require_device(tensor)
        mine = pack_forms(tensors).to(self._device)
        raw = mine.view(-1).view(torch.uint8)
        gathered = self._gather_raw(operation, raw, [raw.numel()] * self.size, must_agree=True)
        all_forms = [unpack_forms(theirs.view(torch.int64).view(mine.shape)) for theirs in gathered]
        first = all_forms[0][0].dtype
        for rank, forms in enumerate(all_forms):
            if any(form.dtype != first for form in forms):
                self._calls.fail(_mismatch(operation, all_forms[0], rank, forms))
        return all_forms

    def _hear_forms(self, operation: str, tensors: Sequence[Tensor] | None, root: int) -> list[TensorForm]:
        """Dtypes and shapes of the root's tensors, one a rank; only the root gives them."""
        rows = torch.zeros(self.size, FORM_NUMBERS, dtype=torch.int64) if tensors is None else pack_forms(tensors)
        rows = rows.to(self._device)
        self._run(
            operation,
            lambda: self._group.broadcast([rows], _broadcast_options(root)),
            rows.nbytes,
            must_agree=True,
        )
        return unpack_forms(rows)

    def _require_agreement(self, operation: str, tensors: Sequence[Tensor]) -> list[TensorForm]:
        all_forms = self._exchange_forms(operation, tensors)
        for rank, forms in enumerate(all_forms):
            if forms != all_forms[0]:
                self._calls.fail(_mismatch(operation, all_forms[0], rank, forms))
        return all_forms[0]

    def _require_device(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device.type:
            raise TypeError(f"this collective moves tensors on {self._device.type}, not on {tensor.device}")


def connect_gloo(
    store: Store, *, rank: int, size: int, address: str, deadline_s: float | None = 300.0
) -> TorchCollective:
    """Meet the other ranks over gloo. Collective call.

    Args:
        store: where the ranks find one another; no other group may use its keys, so give a `dist.PrefixStore`.
        address: IP address of this host on the network to be used. No host name is looked up.

    Raises:
        UsageError: no network interface of this host has the address.
        DeadlineExceeded, PeerLost: another rank did not come.
    """
    interface_with(address)
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_device(hostname=address)]
    options._timeout = timeout_of(deadline_s)
    with _meeting(size, deadline_s):
        return TorchCollective(backend(store, rank, size, options), address=address, deadline_s=deadline_s)


def connect_nccl(
    store: Store,
    *,
    rank: int,
    size: int,
    device: torch.device,
    address: str | None = None,
    deadline_s: float | None = 300.0,
) -> TorchCollective:
    """Meet the other ranks over NCCL, each with its CUDA device. Otherwise as `connect_gloo`.

    NCCL reads its interface from the environment, once in a process, when it first communicates. Without an address
    NCCL chooses.
    """
    backend: Any = dist.ProcessGroupNCCL
    options = backend.Options()
    options._timeout = timeout_of(deadline_s)
    torch.cuda.set_device(device)
    with nccl_interface(address), _meeting(size, deadline_s):
        group = backend(store, rank, size, options)
        collective = TorchCollective(group, device=device, address=address, deadline_s=deadline_s)
        collective.barrier()
    return collective


@contextmanager
def _meeting(size: int, deadline_s: float | None) -> Iterator[None]:
    try:
        yield
    except PacelineError:
        raise
    except (RuntimeError, OSError) as error:
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            raise DeadlineExceeded(f"not all of {size} ranks have met within {deadline_s} s: {error}") from None
        raise PeerLost(f"not all of {size} ranks have met: {error}") from None


def _broadcast_options(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


@functools.lru_cache(maxsize=4096)
def _all_reduce_of(op: ReduceOp, dtype: torch.dtype, num_elements: int) -> str:
    return str(Signature("all_reduce", dtype, num_elements, op))


def _tag(tensor: Tensor) -> int:
    """Of a message over gloo, which ends the process whose buffer is shorter than a message with its tag."""
    return zlib.crc32(f"{tensor.dtype} {tensor.numel()}".encode()) & 0x7FFFFFFF


def _mismatch(operation: str, first: Sequence[TensorForm], rank: int, other: Sequence[TensorForm]) -> TensorMismatch:
    mine, theirs = (", ".join(map(str, forms)) for forms in (first, other))
    return TensorMismatch(f"ranks disagree in {operation}: rank 0 has {mine}, rank {rank} has {theirs}")
