"""What torch.distributed gets for an operation under way."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from paceline.comm import base
from paceline.errors import DeadlineExceeded

NO_TIMEOUT = timedelta(0)  # what torch passes where the caller gave none


@final
class GroupWork(Work):
    """One operation of a process group.

    Whoever drives the operation calls `end` once. A thread that waits calls `help`, which drives the
    operation in that thread, or else waits for whoever drives it.
    """

    def __init__(
        self,
        label: str,
        start: Callable[[], base.Work],
        outputs: list[Tensor],
        help: "Callable[[GroupWork, float | None], None]",
    ) -> None:
        """`label` names the operation in errors; `outputs` is what the future holds in the end."""
        super().__init__()
        self.label = label
        self.start = start
        self.under_way: base.Work | None = None
        self.source = -1
        """The rank that sent what was received."""
        self.is_over = False
        self._outputs = outputs
        self._help = help
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._trigger: Any = None
        self._future: Any = None

    def end(self, error: BaseException | None = None) -> None:
        """The outputs are in place, or never will be. Runs the future's callbacks in this thread."""
        with self._lock:
            self._error = error
            self.is_over = True
            trigger = self._trigger
        self._over.set()
        # They may hold tensors.
        del self.start
        self.under_way = None
        if trigger is not None:
            trigger.set_result(None)

    def wait_until_over(self, timeout_s: float | None) -> None:
        self._over.wait(timeout_s)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the outputs are in place; always true.

        Raises:
            DeadlineExceeded: a timeout was given, and that is over; the operation goes on.
            PeerLost, DeadlineExceeded, Aborted, TensorMismatch: the operation failed.
        """
        if not self.is_over:
            timeout_s = timeout.total_seconds() if timeout > NO_TIMEOUT else None
            self._help(self, timeout_s)
            if not self.is_over:
                raise DeadlineExceeded(f"{self.label} is not over after {timeout_s} s; give wait a longer timeout")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.is_over

    def is_success(self) -> bool:
        return self.is_over and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return self.source

    def _source_rank(self) -> int:
        return self.source

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Done when the operation is over; holds the outputs, or raises what `wait` raises as a RuntimeError."""
        with self._lock:
            is_over = self._future is None and self.is_over
            if self._future is None:
                self._trigger = torch.futures.Future()
                # `then`, because C++ sees only errors that a callback raises.
                self._future = self._trigger.then(self._settle)
        if is_over:
            self._trigger.set_result(None)
        return self._future  # type: ignore[no-any-return]

    def _settle(self, _: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs
