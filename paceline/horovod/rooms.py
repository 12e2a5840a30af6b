"""Memory for what an optimizer reduces in every step: it is reduced where it lies, and copied nowhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor

from paceline.comm.base import Collective, ReduceOp, Work
from paceline.gradient_views import GradientViews
from paceline.horovod.flat import Flat
from paceline.horovod.requests import Request, dtype_of

_LEAST_BYTES = 2**24
"""So much is allocated at a time: what nobody has written to takes no memory."""
_MOST_BYTES = 2**32
"""Rooms stay until the end. A script that makes one optimizer after another would fill the memory with them."""
_ALIGNED_BYTES = 64


@final
@dataclass(eq=False, frozen=True)
class Room:
    """One request's tensors, which have one dtype, one behind the other, in the same place on every rank."""

    whole: Tensor
    """Of shape (elements of all,)."""
    given: GradientViews
    """The tensors."""
    start: Callable[[], Work]
    """Begins to reduce the whole over all ranks."""

    def vacate(self) -> None:
        """Whatever is laid here next, gradients that are held elsewhere stay as they are."""
        for index in range(len(self.given.views)):
            if self.given.is_kept(index):
                self.given.leave(index)


@final
class Rooms:
    """The rooms of one process set. Every rank makes the same ones in the same order."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._rooms: dict[Request, Room] = {}
        self._free: Tensor | None = None
        self._left_bytes = _MOST_BYTES

    def find(self, request: Request) -> Room | None:
        return self._rooms.get(request)

    def make(self, request: Request) -> Room | None:
        """A room for the request's tensors; none where too much memory has been given away. Collective call."""
        num_bytes = -(-request.num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if not 0 < num_bytes <= self._left_bytes:
            return None
        self._left_bytes -= num_bytes
        if self._free is None or self._free.numel() < num_bytes:
            self._free = self._collective.allocate(max(num_bytes, _LEAST_BYTES))
        raw, self._free = self._free[:num_bytes], self._free[num_bytes:]
        whole = raw[: request.num_bytes].view(dtype_of(request.members[0].dtype))
        views = Flat.cut(whole, request.shapes).views
        op: ReduceOp = request.op  # type: ignore[assignment]  # the interface has made it one
        start = self._collective.persistent_all_reduce(whole, op=op)
        room = self._rooms[request] = Room(whole, GradientViews(views, [whole] * len(views)), start)
        return room
