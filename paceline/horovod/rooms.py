"""Memory for what an optimizer reduces in every step: it is reduced where it lies, and copied nowhere."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.comm.base import Collective, ReduceOp, Work
from paceline.gradient_views import GradientViews
from paceline.horovod.flat import Flat
from paceline.horovod.requests import Request, dtype_of

_LEAST_BYTES = 2**24
"""Ranks allocate at least so much at a time. Pages that nobody has written to take no memory."""
_MOST_BYTES = 2**32
"""Rooms stay until the end. A script that makes one optimizer after another would fill the memory with them."""
_ALIGNED_BYTES = 64
_MOST_RUNS, _MOST_KNOWN = 64, 4096

_Start = Callable[[], Work]


@final
@dataclass(eq=False, frozen=True)
class Room:
    """One request's tensors, which have one dtype, one behind the other, in the same place on every rank."""

    request: Request
    area: Tensor
    """The allocation that the room is in, of shape (bytes,)."""
    place: range
    """The room's bytes there."""
    flat: Flat
    """The tensors, one behind the other."""
    given: GradientViews
    """The same, as gradients."""

    def is_beside(self, other: "Room") -> bool:
        """Whether the other one follows, and is reduced alike."""
        mine, theirs = self.request, other.request
        is_next = self.area is other.area and self.place.stop == other.place.start
        return is_next and (mine.op, mine.dtypes) == (theirs.op, theirs.dtypes)


@final
class Rooms:
    """The rooms of one process set. Every rank makes the same ones in the same order."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._rooms: dict[Request, Room] = {}
        self._known: dict[
            int, tuple[Request, Room]
        ] = {}  # by the request's id: to compare a thousand members takes 0.1 ms
        self._area: Tensor | None = None
        self._used_bytes = 0  # of the area
        self._left_bytes = _MOST_BYTES
        self._starts: dict[tuple[int, ...], list[_Start]] = {}

    def find(self, request: Request) -> Room | None:
        known = self._known.get(id(request))
        if known is not None:
            return known[1]
        room = self._rooms.get(request)
        if room is not None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[id(request)] = (request, room)
        return room

    @torch.inference_mode(False)  # of a metric that asks first; what it makes nobody else could write to
    def make(self, request: Request) -> Room | None:
        """A room for the request's tensors; none where too much memory has been given away. Collective call."""
        num_bytes = -(-request.num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if not 0 < num_bytes <= self._left_bytes:
            return None
        self._left_bytes -= num_bytes
        area = self._area
        if area is None or area.numel() - self._used_bytes < num_bytes:
            area = self._area = self._collective.allocate(max(num_bytes, _LEAST_BYTES))
            self._used_bytes = 0
        place = range(self._used_bytes, self._used_bytes + num_bytes)
        self._used_bytes = place.stop
        whole = area[place.start : place.start + request.num_bytes].view(dtype_of(request.dtypes[0]))
        flat = Flat.cut(whole, request.shapes)
        given = GradientViews(flat.views, [whole] * len(flat.views))
        room = self._rooms[request] = Room(request, area, place, flat, given)
        return room

    def starts(self, rooms: Sequence[Room]) -> list[_Start]:
        """What begins to reduce these rooms over all ranks: neighbours together, which spares meetings."""
        key = tuple(map(id, rooms))
        starts = self._starts.get(key)
        if starts is None:
            if len(self._starts) >= _MOST_RUNS:
                self._starts.clear()
            starts = self._starts[key] = [*map(self._start_of, _runs(rooms))]
        return starts

    def _start_of(self, run: Sequence[Room]) -> _Start:
        first, last = run[0], run[-1]
        tensor = first.area[first.place.start : last.place.stop].view(first.flat.whole.dtype)
        op: ReduceOp = first.request.op  # type: ignore[assignment]  # the interface has made it one
        return self._collective.persistent_all_reduce(tensor, op=op)


def _runs(rooms: Sequence[Room]) -> list[list[Room]]:
    runs = [[rooms[0]]] if rooms else []
    for room, following in itertools.pairwise(rooms):
        if room.is_beside(following):
            runs[-1].append(following)
        else:
            runs.append([following])
    return runs
