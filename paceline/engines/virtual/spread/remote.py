"""A worker's collective, store and reporter where the simulation runs in another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from paceline.comm.arguments import require_other
from paceline.comm.base import Collective, OptimizerSpec, Push, ReduceOp, Reply, Store, Work
from paceline.comm.reduction import require_reducible
from paceline.engines.virtual.spread.seat import Seat
from paceline.layout import Layout
from paceline.records import Record, Reporter


@final
class RemoteCollective(Collective):
    """Has the deputy do everything.

    Args:
        operation_s, message_s: what the worker is at, as in `VirtualCollective`.
    """

    def __init__(self, seat: Seat, *, size: int, operation_s: float, message_s: float) -> None:
        self.rank, self.size, self.timing = seat.rank, size, seat.collective_timing
        self._seat, self._operation_s, self._message_s = seat, operation_s, message_s
        self._num_works = 0

    def allocate(self, num_bytes: int) -> Tensor:
        tensor: Tensor = self._seat.allocate("collective", num_bytes)
        return tensor

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        require_reducible(op, tensor.dtype)
        return self._start(tensor, self._operation_s, "all_reduce", tensor, op)

    def persistent_all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Callable[[], Work]:
        require_reducible(op, tensor.dtype)
        if not self._seat.carrier.holds(tensor):  # then there is nothing to prepare
            return lambda: self.all_reduce(tensor, op=op)
        prepared = self._next_number()
        self._seat.tell("prepare_all_reduce", prepared, tensor, op)
        return lambda: self._start(tensor, self._operation_s, "start_all_reduce", prepared)

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> None:
        _put(self._seat.ask("broadcast", tensor, root), tensor)

    def gather(self, tensor: Tensor, *, root: int = 0) -> list[Tensor] | None:
        return self._ask("gather", tensor, root=root)  # type: ignore[no-any-return]

    def scatter(self, tensors: Sequence[Tensor] | None, *, root: int = 0) -> Tensor:
        return self._ask("scatter", tensors, root=root)  # type: ignore[no-any-return]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._ask("all_gather", tensor)  # type: ignore[no-any-return]

    def reduce_scatter(self, tensors: Sequence[Tensor], *, op: ReduceOp = "sum") -> Tensor:
        return self._ask("reduce_scatter", tensors, op=op)  # type: ignore[no-any-return]

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._ask("all_to_all", tensors)  # type: ignore[no-any-return]

    def send(self, tensor: Tensor, *, destination: int) -> Work:
        require_other(destination, rank=self.rank, size=self.size)
        self.timing.moved_bytes += tensor.nbytes
        # A copy, since the tensor is free at once.
        return self._start(None, self._message_s, "send", tensor.detach().clone(), destination)

    def recv(self, tensor: Tensor, *, source: int) -> Work:
        require_other(source, rank=self.rank, size=self.size)
        return self._start(tensor, 0.0, "recv", tuple(tensor.shape), tensor.dtype, source)

    def barrier(self) -> None:
        self._ask("barrier")

    def set_deadline(self, deadline_s: float | None) -> None:
        """Nothing, as with `VirtualCollective`."""

    def abort(self, reason: str) -> None:
        self._seat.tell("call", "collective", "abort", (reason,), {})

    def close(self) -> None:
        self._seat.tell("call", "collective", "close", (), {})

    def _ask(self, method: str, *arguments: Any, **settings: Any) -> Any:
        return self._seat.ask("call", "collective", method, arguments, settings)

    def _start(self, target: Tensor | None, own_s: float, method: str, *arguments: Any) -> Work:
        number = self._next_number()
        self._seat.begin(method, number, *arguments)
        self._seat.process.advance(own_s)
        self.timing.communication_s += own_s
        return _RemoteWork(self._seat, number, target)

    def _next_number(self) -> int:
        self._num_works += 1
        return self._num_works


@final
class _RemoteWork(Work):
    """What the deputy has under way for this worker.

    Args:
        target: where the result goes; none: there is none.
    """

    def __init__(self, seat: Seat, number: int, target: Tensor | None) -> None:
        self._seat, self._number, self._target = seat, number, target
        self._begun_after = seat.num_answers
        self._is_over = False

    def poll(self) -> bool:
        # Nothing that began in this turn can be over in it: the deputy need not be asked.
        seat = self._seat
        may_ask = seat.process.may_wait and not seat.process.promise.holds(seat.process.now_s)
        if not self._is_over and self._begun_after < seat.num_answers and may_ask:
            self._end(*seat.ask("poll", self._number))
        return self._is_over

    def wait(self) -> None:
        if not self._is_over:
            self._end(True, self._seat.ask("wait", self._number))

    def _end(self, is_over: bool, result: Tensor | None) -> None:
        self._is_over = is_over
        if is_over and self._target is not None and result is not None:
            _put(result, self._target)


@final
class RemoteStore(Store):
    """Has the deputy do everything."""

    def __init__(self, seat: Seat) -> None:
        self.timing = seat.store_timing
        self._seat = seat

    def allocate(self, num_bytes: int) -> Tensor:
        tensor: Tensor = self._seat.allocate("store", num_bytes)
        return tensor

    def attach(self, layout: Layout, spec: OptimizerSpec, parameters: Tensor, gradients: Tensor) -> None:
        self._ask("attach", layout, spec, parameters, gradients)

    def exchange(self, push: Push) -> Reply:
        return self._seat.ask("exchange", push)  # type: ignore[no-any-return]

    def wait_for_admission(self, *, pause_at: int) -> Reply:
        return self._ask("wait_for_admission", pause_at=pause_at)  # type: ignore[no-any-return]

    def pull(self) -> int:
        return self._ask("pull")  # type: ignore[no-any-return]

    def leave(self) -> None:
        self._ask("leave")

    def optimizer_state(self) -> dict[str, Tensor]:
        return self._ask("optimizer_state")  # type: ignore[no-any-return]

    def load_state(self, state: Mapping[str, Tensor], *, iteration: int) -> None:
        self._ask("load_state", dict(state), iteration=iteration)

    def abort(self, reason: str) -> None:
        self._seat.tell("call", "store", "abort", (reason,), {})

    def close(self) -> None:
        self._seat.tell("call", "store", "close", (), {})

    def _ask(self, method: str, *arguments: Any, **settings: Any) -> Any:
        return self._seat.ask("call", "store", method, arguments, settings)


@final
class RemoteReporter(Reporter):
    """Records go to the simulation, which writes."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def emit(self, record: Record) -> None:
        self._seat.keep(record)

    def save(self, name: str, content: bytes | memoryview) -> None:
        self._seat.ask("save", name, bytes(content))

    def stop_requested(self) -> bool:
        return self._seat.is_stopping


def _put(result: Tensor, target: Tensor) -> None:
    """What lies in shared memory is there already."""
    if result.data_ptr() != target.data_ptr():
        target.detach().copy_(result)
