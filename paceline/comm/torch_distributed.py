"""Collectives over torch.distributed: gloo between hosts, NCCL between GPUs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, final

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Store

from paceline.comm.arguments import flatten, require_one_each, require_other, require_root
from paceline.comm.base import Collective, ReduceOp, Timing, Work
from paceline.comm.reduction import Reduction, require_reducible
from paceline.comm.signature import TensorForm, pack_forms, unpack_forms
from paceline.comm.torch_reduction import from_wire, options_for, to_wire
from paceline.errors import Aborted, DeadlineExceeded, PacelineError, PeerLost, TensorMismatch, UsageError

_FOR_EVER = timedelta(days=365)
_LOOK_INTERVAL_S = 0.2
# NCCL's futures are done when the work is enqueued, so its works are asked in turn.
_ASK_INTERVAL_S = 50e-6


@final
class TorchCollective(Collective):
    """Operations of a torch.distributed process group, gloo or NCCL, under Paceline's rules.

    All blocked time counts as communication: the backends do not tell it from waiting. `wait` blocks this thread until
    the result is in place, with NCCL too, so that every wait has a deadline. Errors name the operation; which rank was
    lost they say only as far as the backend does. After any error every later call raises.

    Sizes and dtypes are compared between ranks except in `all_reduce`, `send` and `recv`, where that would double the
    latency: there a disagreement ends gloo's process.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, device: torch.device | None = None, deadline_s: float | None = 300.0
    ) -> None:
        """Take over a process group.

        Args:
            group: one of gloo or NCCL; `close` shuts it down.
            device: where this rank's tensors are; None for the CPU with gloo and the current CUDA device with NCCL.
            deadline_s: the longest that any one call may wait; None for ever. The group's own timeout holds too.
        """
        self.rank = group.rank()
        self.size = group.size()
        self.timing = Timing()
        # Any: a process group and a bare backend take the same calls, which their stubs tell of neither.
        self._group: Any = group
        self._is_closed = False
        self._deadline_s = deadline_s
        self._failure: PacelineError | None = None
        self._is_nccl = group.name().lower() == "nccl"
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if self._is_nccl else torch.device("cpu")
        self._device = device

    def allocate(self, num_bytes: int) -> Tensor:
        """As `Collective.allocate`; plain memory, on this rank's GPU with NCCL."""
        self._check()
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
        finish = partial(from_wire, wire, tensor, op, size=self.size)
        num_bytes = 2 * (self.size - 1) * wire.nbytes // self.size
        return self._start(f"all_reduce({op})", lambda: self._group.allreduce([wire], options), num_bytes, finish)

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> None:
        require_root(root, size=self.size)
        self._require_agreement("broadcast", [tensor])
        flat, copy_back = flatten(tensor, device_type=self._device.type, is_target=True)
        raw = flat.view(torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._run("broadcast", lambda: self._group.broadcast([raw], options), raw.numel())
        if copy_back is not None:
            copy_back()

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
        operation = f"send to rank {destination}"
        return self._start(operation, lambda: self._watched(self._group.send([raw], destination, 0)), raw.numel())

    def recv(self, tensor: Tensor, *, source: int) -> None:
        require_other(source, rank=self.rank, size=self.size)
        flat, copy_back = flatten(tensor, device_type=self._device.type, is_target=True)
        raw = flat.view(torch.uint8)
        self._run(f"recv from rank {source}", lambda: self._watched(self._group.recv([raw], source, 0)), raw.numel())
        if copy_back is not None:
            copy_back()

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        require_one_each(tensors, size=self.size)
        forms = [theirs[self.rank] for theirs in self._exchange_forms("all_to_all", tensors)]
        return self._exchange_raw("all_to_all", tensors, forms)

    def barrier(self) -> None:
        one = torch.zeros(1, device=self._device)
        self._run("barrier", lambda: self._group.allreduce([one], dist.AllreduceOptions()), 0)

    def set_deadline(self, deadline_s: float | None) -> None:
        self._deadline_s = deadline_s
        if hasattr(self._group, "_set_default_timeout"):
            self._group._set_default_timeout(_timeout(deadline_s))

    def abort(self, reason: str) -> None:
        self._failure = self._failure or Aborted(reason)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._failure = self._failure or UsageError("it was closed")
            self._group.shutdown()
            self._group = None

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(f"this collective is unusable since: {self._failure}")

    def _fail(self, error: PacelineError) -> NoReturn:
        self._failure = self._failure or error
        raise error

    def _run(self, operation: str, start: Callable[[], Any], num_bytes: int) -> None:
        self._start(operation, start, num_bytes).wait()

    def _start(
        self, operation: str, start: Callable[[], Any], num_bytes: int, finish: Callable[[], None] | None = None
    ) -> _TorchWork:
        self._check()
        self.timing.moved_bytes += num_bytes
        with self.translated(operation):
            return _TorchWork(self, operation, start(), finish)

    def await_backend(self, operation: str, work: Any) -> None:
        """Block until a backend's work is over, one way or the other, or raise."""
        started_s = time.perf_counter()
        done = threading.Event()
        if not self._is_nccl:
            work.get_future().add_done_callback(lambda _: done.set())
        try:
            while not work.is_completed():
                self._check()
                interval_s = _ASK_INTERVAL_S if self._is_nccl else _LOOK_INTERVAL_S
                if self._deadline_s is not None:
                    left_s = started_s + self._deadline_s - time.perf_counter()
                    if left_s <= 0:
                        self._fail(_exceeded(operation, self._deadline_s))
                    interval_s = min(interval_s, left_s)
                done.wait(interval_s)
        finally:
            self.timing.communication_s += time.perf_counter() - started_s

    @contextmanager
    def translated(self, operation: str) -> Iterator[None]:
        """Raise the backend's errors as Paceline's, and remember them."""
        try:
            yield
        except RuntimeError as error:
            self._check()
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                self._fail(_exceeded(operation, self._deadline_s))
            self._fail(PeerLost(f"a peer is lost during {operation}: {error}"))

    def _watched(self, work: Any) -> Any:
        """A point-to-point work as one that can be asked whether it is over."""
        return work if self._is_nccl else _WatchedWork(work)

    def _gather_raw(self, operation: str, raw: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Every rank's bytes, given how many each has."""
        longest = max(lengths)
        if longest == 0:
            return [raw.clone() for _ in lengths]
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: raw.numel()].copy_(raw)
        gathered = [torch.empty_like(padded) for _ in lengths]
        num_bytes = longest * (self.size - 1)
        self._run(operation, lambda: self._group.allgather([gathered], [padded], AllgatherOptions()), num_bytes)
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
        gathered = self._gather_raw(operation, raw, [raw.numel()] * self.size)
        all_forms = [unpack_forms(theirs.view(torch.int64).view(mine.shape)) for theirs in gathered]
        first = all_forms[0][0].dtype
        for rank, forms in enumerate(all_forms):
            if any(form.dtype != first for form in forms):
                self._fail(_mismatch(operation, all_forms[0], rank, forms))
        return all_forms

    def _require_agreement(self, operation: str, tensors: Sequence[Tensor]) -> list[TensorForm]:
        all_forms = self._exchange_forms(operation, tensors)
        for rank, forms in enumerate(all_forms):
            if forms != all_forms[0]:
                self._fail(_mismatch(operation, all_forms[0], rank, forms))
        return all_forms[0]

    def _require_device(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device.type:
            raise TypeError(f"this collective moves tensors on {self._device.type}, not on {tensor.device}")


@final
class _TorchWork(Work):
    def __init__(
        self, collective: TorchCollective, operation: str, work: Any, finish: Callable[[], None] | None
    ) -> None:
        self._collective = collective
        self._operation = operation
        self._work: Any | None = work
        self._finish = finish

    def poll(self) -> bool:
        if self._work is not None and self._work.is_completed():
            self.wait()
        return self._work is None

    def wait(self) -> None:
        if self._work is None:
            return
        self._collective.await_backend(self._operation, self._work)
        with self._collective.translated(self._operation):
            self._work.wait()
        if self._finish is not None:
            self._finish()
        self._work = self._finish = None


@final
class _WatchedWork:
    """A message over gloo, which tells that it is over only to whoever blocks on it: a thread does."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._future: Any = torch.futures.Future()
        threading.Thread(target=self._watch, daemon=True).start()

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def wait(self) -> None:
        self._future.wait()

    def _watch(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(None)


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
    options._timeout = _timeout(deadline_s)
    with _meeting(size, deadline_s):
        return TorchCollective(backend(store, rank, size, options), deadline_s=deadline_s)


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
    options._timeout = _timeout(deadline_s)
    torch.cuda.set_device(device)
    interface = nullcontext() if address is None else _environment("NCCL_SOCKET_IFNAME", "=" + interface_with(address))
    with interface, _meeting(size, deadline_s):
        collective = TorchCollective(backend(store, rank, size, options), device=device, deadline_s=deadline_s)
        collective.barrier()
    return collective


def interface_with(address: str) -> str:
    """Name of the network interface that has the IP address.

    Raises:
        UsageError: none has it; the message lists those there are.
    """
    addresses = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    if address not in addresses:
        raise UsageError(f"no network interface of this host has address {address}; there are {sorted(addresses)}")
    return str(addresses[address])


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _meeting(size: int, deadline_s: float | None) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            raise DeadlineExceeded(f"not all of {size} ranks have met within {deadline_s} s: {error}") from None
        raise PeerLost(f"not all of {size} ranks have met: {error}") from None


def _timeout(deadline_s: float | None) -> timedelta:
    return _FOR_EVER if deadline_s is None else timedelta(seconds=deadline_s)


def _exceeded(operation: str, deadline_s: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"a peer has not taken part in {operation} within {deadline_s} s; give a longer deadline")


def _mismatch(operation: str, first: Sequence[TensorForm], rank: int, other: Sequence[TensorForm]) -> TensorMismatch:
    mine, theirs = (", ".join(map(str, forms)) for forms in (first, other))
    return TensorMismatch(f"ranks disagree in {operation}: rank 0 has {mine}, rank {rank} has {theirs}")
