"""The collective and the mailbox of a world of one: nothing moves, but mistakes are found as in a larger world."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from paceline.comm.arguments import require_from_root, require_one_each, require_root
from paceline.comm.base import Collective, Finished, ReduceOp, Timing, Work
from paceline.comm.mailbox import Handler, Mailbox
from paceline.comm.reduction import require_reducible
from paceline.errors import Aborted, PacelineError, UsageError


@final
class AloneCollective(Collective):
    """One rank, which is its own root and its own source.

    Raises on every call after `abort` (`Aborted`) or `close` (`UsageError`), and on arguments that a larger world
    would refuse.
    """

    completes_alike = True

    def __init__(self, *, timing: Timing | None = None) -> None:
        """`timing`: where to go on counting, for a rank that is left alone."""
        self.rank = 0
        self.size = 1
        self.timing = timing or Timing()
        self._failure: PacelineError | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        self._check()
        if num_bytes <= 0:
            raise ValueError(f"an allocation needs at least one byte, not {num_bytes}")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        self._check()
        require_reducible(op, tensor.dtype)
        return Finished()

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> None:
        self._check()
        require_root(root, size=1)

    def gather(self, tensor: Tensor, *, root: int = 0) -> list[Tensor]:
        self._check()
        require_root(root, size=1)
        return [_copy(tensor)]

    def scatter(self, tensors: Sequence[Tensor] | None, *, root: int = 0) -> Tensor:
        self._check()
        require_from_root(tensors, root=root, rank=0, size=1)
        assert tensors is not None  # this rank is the root
        return _copy(tensors[0])

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._check()
        return [_copy(tensor)]

    def reduce_scatter(self, tensors: Sequence[Tensor], *, op: ReduceOp = "sum") -> Tensor:
        self._check()
        require_one_each(tensors, size=1)
        tensor = tensors[0]
        require_reducible(op, tensor.dtype)
        return _copy(tensor)

    def send(self, tensor: Tensor, *, destination: int) -> Work:
        self._check()
        raise UsageError(f"a world of 1 has no rank {destination} to send to")

    def recv(self, tensor: Tensor, *, source: int) -> Work:
        self._check()
        raise UsageError(f"a world of 1 has no rank {source} to receive from")

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._check()
        require_one_each(tensors, size=1)
        return [_copy(tensors[0])]

    def barrier(self) -> None:
        self._check()

    def set_deadline(self, deadline_s: float | None) -> None:
        pass

    def abort(self, reason: str) -> None:
        self._failure = self._failure or Aborted(reason)

    def close(self) -> None:
        self._failure = self._failure or UsageError("it was closed")

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(f"this collective is unusable since: {self._failure}")


@final
class AloneMailbox(Mailbox):
    """Nothing comes, and there is nobody to send to."""

    has_ended = False

    def __init__(self) -> None:
        self.timing = Timing()

    def open(self, handler: Handler) -> None:
        pass

    @contextmanager
    def turn(self) -> Iterator[None]:
        yield

    def send(self, message: Tensor, *, destination: int) -> None:
        raise UsageError(f"a world of 1 has no rank {destination} to send to")

    def wait(self, is_over: Callable[[], bool], what: str, *, sender: int) -> None:
        if not is_over():
            raise UsageError(f"a world of 1 waits in vain for {what}")

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
