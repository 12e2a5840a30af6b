"""The collective of a virtual world: it computes real results, and takes the time of its simulated messages."""

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.cluster.worker_costs import WorkerCosts
from paceline.comm.arguments import flatten, require_from_root, require_one_each, require_other, require_root
from paceline.comm.base import Collective, Cross, ReduceOp, Timing, Work
from paceline.comm.reduction import Reduction, require_reducible
from paceline.comm.signature import Signature
from paceline.comm.works import WhenWaitedFor
from paceline.engines.virtual.network import patterns
from paceline.engines.virtual.network.meeting import Awaited, Call, Meeting, Operation, Parcel
from paceline.engines.virtual.process import Process, Signal
from paceline.errors import Aborted, PacelineError, PeerLost, UsageError

_WORD_BYTES = 8


@final
class VirtualCollective(Collective):
    """One rank's end. Tensors are reduced in rank order, as in shared memory, whatever way their messages take. What
    all ranks have come to, all complete, also if one dies in it.

    A tensor that is sent is copied, and may be changed at once. One that is reduced in place must be left alone until
    the work is over. `costs` is what operations and messages take the rank itself. `is_lost` draws whether a message
    that is sent once is lost.
    """

    completes_alike = True

    def __init__(
        self,
        meeting: Meeting,
        process: Process,
        *,
        rank: int,
        costs: WorkerCosts = WorkerCosts(),  # noqa: B008 - frozen
        timing: Timing | None = None,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank, self.size = rank, meeting.size
        self.timing = timing or Timing()
        self.lost_since_s: float | None = None
        """The time since when this rank has waited for one that was gone."""
        self._meeting, self._process = meeting, process
        self._costs, self._is_lost = costs, is_lost
        self._parts: tuple[VirtualCollective, VirtualCollective | None] | None = None
        self._num_operations = 0
        self._failure: PacelineError | None = None
        self._waited_since_s = 0.0

    def allocate(self, num_bytes: int) -> Tensor:
        if num_bytes <= 0:
            raise ValueError(f"an allocation needs at least one byte, not {num_bytes}")
        self._run(Call(Signature("barrier", num_elements=num_bytes), self._all_gather))
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        return self.persistent_all_reduce(tensor, op=op)()

    def persistent_all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Callable[[], Work]:
        require_reducible(op, tensor.dtype)
        flat, copy_back = flatten(tensor, device_type=tensor.device.type, is_target=True)
        num_bytes = float(flat.nbytes)
        hosts = self._meeting.ranks_by_host

        def reduce(operation: Operation) -> None:
            flats = operation.payloads()
            Reduction(op, flat.dtype)(flats, flats[0])
            for other in flats[1:]:
                other.copy_(flats[0])

        signature = Signature("all_reduce", flat.dtype, flat.numel(), op)

        def start() -> Work:
            if copy_back is not None:
                flat.copy_(tensor.detach().reshape(-1))
            call = Call(signature, lambda _: patterns.all_reduce(hosts, num_bytes), flat, num_bytes, reduce)
            return _OperationWork(self, self._start(call), call, copy_back)

        return start

    def divide(self, within: "VirtualCollective", between: "VirtualCollective | None") -> None:
        """Know the ranks of this host and, on its first rank, the first ranks of all hosts."""
        self._parts = within, between
        within.timing = self.timing
        if between is not None:
            between.timing = self.timing

    def mean_across(self, tensor: Tensor, cross: Cross, *, is_whole: bool) -> Callable[[], Work]:
        """The first rank of a host holds everything."""
        if self._parts is None:
            return cross(self, tensor)
        within, between = self._parts
        flat, _ = flatten(tensor, device_type=tensor.device.type, is_target=True)
        prepared = cross(between, flat) if between is not None else None

        def run() -> None:
            everyone = within.gather(flat) if within.size > 1 else [flat]
            if everyone is not None and between is not None and prepared is not None:
                total = torch.stack(everyone).sum(0) if len(everyone) > 1 else flat
                flat.copy_(total * (between.size / self.size))
                prepared().wait()
            if within.size > 1:
                within.broadcast(flat)

        return lambda: WhenWaitedFor(run)

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> None:
        require_root(root, size=self.size)
        flat, copy_back = flatten(tensor, device_type=tensor.device.type, is_target=True)
        num_bytes = float(flat.nbytes)
        operation = self._run(
            Call(
                Signature("broadcast", flat.dtype, flat.numel(), root=root),
                lambda _: patterns.broadcast(self.size, root, num_bytes),
                flat.clone() if self.rank == root else None,
                num_bytes,
            )
        )
        if self.rank != root:
            flat.copy_(operation.calls[root].payload)
            if copy_back is not None:
                copy_back()

    def gather(self, tensor: Tensor, *, root: int = 0) -> list[Tensor] | None:
        require_root(root, size=self.size)
        operation = self._run(
            Call(
                Signature("gather", tensor.dtype, root=root),
                lambda op: patterns.gather(self.size, root, op.num_bytes),
                _copy(tensor),
                float(tensor.nbytes),
            )
        )
        return [_copy(each) for each in operation.payloads()] if self.rank == root else None

    def scatter(self, tensors: Sequence[Tensor] | None, *, root: int = 0) -> Tensor:
        require_from_root(tensors, root=root, rank=self.rank, size=self.size)
        given = [_copy(tensor) for tensor in tensors or ()]
        operation = self._run(
            Call(
                Signature("scatter", root=root),
                lambda op: patterns.scatter(self.size, root, op.num_bytes),
                given,
                _bytes_each(given),
            )
        )
        return _copy(operation.calls[root].payload[self.rank])

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        call = Call(Signature("all_gather", tensor.dtype), self._all_gather, _copy(tensor), float(tensor.nbytes))
        return [_copy(each) for each in self._run(call).payloads()]

    def reduce_scatter(self, tensors: Sequence[Tensor], *, op: ReduceOp = "sum") -> Tensor:
        require_one_each(tensors, size=self.size)
        require_reducible(op, tensors[0].dtype)
        total = sum(tensor.numel() for tensor in tensors)
        parts = self._exchange_all(Signature("reduce_scatter", tensors[0].dtype, total, op), tensors)
        result = _copy(parts[0])
        Reduction(op, result.dtype)([part.reshape(-1) for part in parts], result.view(-1))
        return result

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        require_one_each(tensors, size=self.size)
        return [_copy(part) for part in self._exchange_all(Signature("all_to_all", tensors[0].dtype), tensors)]

    def send(self, tensor: Tensor, *, destination: int) -> Work:
        return self._send(tensor, destination, is_lost=False)

    def send_once(self, tensor: Tensor, *, destination: int) -> Work:
        return self._send(tensor, destination, is_lost=self._is_lost())

    def _send(self, tensor: Tensor, destination: int, *, is_lost: bool) -> Work:
        require_other(destination, rank=self.rank, size=self.size)
        self._check()
        flat, _ = flatten(tensor, device_type=tensor.device.type)
        parcel = Parcel(flat.clone(), is_lost=is_lost)
        self.timing.moved_bytes += flat.nbytes
        self.timing.communication_s += self._process.send_off(self._costs)
        self._process.post(self._meeting.send, self.rank, destination, parcel)
        return _MessageWork(self, parcel, f"rank {destination} to be sent {flat.numel()} elements")

    def recv(self, tensor: Tensor, *, source: int) -> Work:
        require_other(source, rank=self.rank, size=self.size)
        self._check()
        flat, copy_back = flatten(tensor, device_type=tensor.device.type, is_target=True)
        awaited = Awaited(flat)
        self._process.post(self._meeting.receive, source, self.rank, awaited)
        return _MessageWork(self, awaited, f"{flat.numel()} elements from rank {source}", copy_back)

    def barrier(self) -> None:
        self._run(Call(Signature("barrier"), self._all_gather, num_bytes=float(_WORD_BYTES)))

    def set_deadline(self, deadline_s: float | None) -> None:
        """Does nothing: the engine finds who waits in vain when nothing can happen any more."""

    def abort(self, reason: str) -> None:
        self._failure = self._failure or Aborted(reason)

    def close(self) -> None:
        self._failure = self._failure or UsageError("it was closed")

    def _exchange_all(self, signature: Signature, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Give every rank its tensor; returns what every rank has given this one."""
        given = [_copy(tensor) for tensor in tensors]
        call = Call(signature, lambda op: patterns.all_to_all(self.size, op.num_bytes), given, _bytes_each(given))
        return [payload[self.rank] for payload in self._run(call).payloads()]

    def _all_gather(self, operation: Operation) -> patterns.Pattern:
        return patterns.all_gather(self.size, operation.num_bytes)

    def _run(self, call: Call) -> Operation:
        return _OperationWork(self, self._start(call), call).finished()

    def _start(self, call: Call) -> int:
        """Take part in the next operation; returns its number."""
        self._check()
        number = self._num_operations
        self._num_operations += 1
        self.timing.communication_s += self._process.take(self._costs.operation)
        self._process.post(self._meeting.join, number, self.rank, call)
        return number

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(f"this collective is unusable since: {self._failure}")

    def _wait(self, signal: Signal, what: Callable[[], str], ready_s: Callable[[], float | None]) -> None:
        """Wait. The time until `ready_s()` counts as waiting for others, and the rest as communication."""
        self._check()
        began_s = self._process.catch_up()
        self._process.wait(signal, what)
        elapsed_s = self._process.now_s - began_s
        came_s = ready_s()
        self._waited_since_s = began_s
        waiting_s = 0.0 if came_s is None else min(elapsed_s, max(0.0, came_s - began_s))
        self.timing.waiting_s += waiting_s
        self.timing.communication_s += elapsed_s - waiting_s

    def broken_off(self, error: PacelineError) -> PacelineError:
        """The error for what this rank has waited for, and for all that it would begin."""
        if isinstance(error, PeerLost):
            self.lost_since_s = self.lost_since_s or self._waited_since_s
        error = type(error)(str(error))
        self._failure = self._failure or error
        return error


@final
class _OperationWork(Work):
    def __init__(
        self, collective: VirtualCollective, number: int, call: Call, copy_back: Callable[[], None] | None = None
    ) -> None:
        self._collective, self._number, self._call, self._copy_back = collective, number, call, copy_back
        self._is_over = False

    def poll(self) -> bool:
        if not self._is_over and self._call.done.fired_s is not None:
            self.finished()
        return self._is_over

    def wait(self) -> None:
        if not self._is_over:
            self.finished()

    def finished(self) -> Operation:
        """Raises TensorMismatch if ranks do not ask for the same."""
        collective, number = self._collective, self._number
        meeting, rank = collective._meeting, collective.rank
        collective._wait(self._call.done, self._what, lambda: self._operation().ready_s)
        self._is_over = True
        operation = self._operation()
        if operation.error is not None:
            raise collective.broken_off(operation.error)
        assert operation.exchange is not None
        collective.timing.moved_bytes += int(operation.exchange.sent_bytes[rank])
        if self._copy_back is not None:
            self._copy_back()
        operation.num_left -= 1
        if not operation.num_left:
            meeting.forget(number)
        return operation

    def _operation(self) -> Operation:
        operation = self._collective._meeting.operation(self._number)
        assert operation is not None
        return operation

    def _what(self) -> str:
        missing = self._collective._meeting.missing(self._number)
        others = f", to which rank(s) {', '.join(map(str, missing))} have not come" if missing else ""
        return f"{self._call.signature}{others}"


@final
class _MessageWork(Work):
    def __init__(
        self,
        collective: VirtualCollective,
        message: Parcel | Awaited,
        what: str,
        copy_back: Callable[[], None] | None = None,
    ) -> None:
        self._collective, self._message, self._what, self._copy_back = collective, message, what, copy_back
        self._is_over = False

    @property
    def is_lost(self) -> bool:
        return self._message.is_lost

    def poll(self) -> bool:
        if not self._is_over and self._message.done.fired_s is not None:
            self._finish()
        return self._is_over

    def wait(self) -> None:
        if not self._is_over:
            self._finish()

    def _finish(self) -> None:
        message = self._message
        self._collective._wait(message.done, lambda: self._what, lambda: message.sent_s)
        self._is_over = True
        if isinstance(message, Awaited) and message.error is not None:
            raise self._collective.broken_off(message.error)
        if self._copy_back is not None:
            self._copy_back()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _bytes_each(tensors: Sequence[Tensor]) -> list[float]:
    return [float(tensor.nbytes) for tensor in tensors]
