"""What a rank asks for."""

import functools
import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, final

import torch

ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER, MEETING = (
    "allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "barrier",
    "meeting",
)
_ALIKE = {ALLREDUCE: "shape", REDUCESCATTER: "shape", BROADCAST: "shape", ALLGATHER: "rest", ALLTOALL: "rest"}
"""What of a shape must agree: all of it, or all but the first dimension."""


@final
class Member(NamedTuple):
    """One tensor of a request."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"


@final
@dataclass(frozen=True)
class Request:
    """What a rank asks for: one operation, of a tensor, of a group of them, or of none."""

    kind: str
    name: str
    members: tuple[Member, ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    is_lasting: bool = True
    """Whether the same is likely to be asked for again; a name that was made up for one call is not."""
    has_room: bool = False
    """Whether its tensors, which have one dtype and are on CPUs, may get memory of their own to be reduced in."""

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Kept, since a bucket of a thousand tensors is looked up in every step."""
        return hash(self.as_plain())

    @functools.cached_property
    def num_bytes(self) -> int:
        return sum(math.prod(each.shape) * dtype_of(each.dtype).itemsize for each in self.members)

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(each.shape for each in self.members)

    @functools.cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of its tensors, each once."""
        return tuple(dict.fromkeys(each.dtype for each in self.members))

    @functools.cached_property
    def shown(self) -> tuple[str, ...]:
        """What a reader calls it: the names of its tensors, or its own where there is none."""
        return tuple(each.name for each in self.members) or (self.name,)

    def as_plain(self) -> tuple[Any, ...]:
        """Plain data, to travel."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return tuple((values | {"members": tuple(map(tuple, self.members))}).values())

    @classmethod
    def from_plain(cls, said: tuple[Any, ...]) -> "Request":
        kind, name, members, *about = said
        return cls(kind, name, tuple(Member(*values) for values in members), *about)


def difference(first: Request, other: Request) -> tuple[str, str, object, object] | None:
    """The name of what differs, in what, and both ways of it."""
    if first.kind != other.kind:
        return first.name, "kind", first.kind, other.kind
    if len(first.members) != len(other.members):
        return first.name, "number of tensors", len(first.members), len(other.members)
    for mine, theirs in zip(first.members, other.members, strict=True) if first.members != other.members else ():
        for what in Member._fields:
            here, there = getattr(mine, what), getattr(theirs, what)
            is_whole = what != "shape" or _ALIKE.get(first.kind) == "shape"
            if here != there and (is_whole or _rest(here) != _rest(there)):
                return mine.name, what, here, there
    for what in ("op", "prescale", "postscale", "root", "has_room"):
        if getattr(first, what) != getattr(other, what):
            return first.name, what, getattr(first, what), getattr(other, what)
    return None


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _rest(shape: tuple[int, ...]) -> tuple[int, ...]:
    """All but the first dimension, and how many there are."""
    return (len(shape), *shape[1:])
