"""An operation on one rank, from asking for it to its result."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from paceline.comm.base import Collective
from paceline.horovod.requests import Request

if TYPE_CHECKING:
    from paceline.horovod.channel import Channel


@final
@dataclass(eq=False, slots=True, weakref_slot=True)
class Operation:
    """What one rank has asked for."""

    request: Request
    tensors: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] | None = None
    """Where the results go; none: what comes of it are new tensors, which in an all-reduce are these at its end."""
    is_group: bool = False
    """Whether the script gets a list."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The tensors' shapes, where they are not the request's: in an all-reduce, one tensor may hold all of its
    request's."""
    splits: tuple[int, ...] = ()
    """For alltoall: how many rows each rank gets."""
    run: Callable[[Collective], Any] | None = None
    """For a meeting: what all ranks do there."""
    finish: Callable[[Any], Any] | None = None
    """Makes of a tensor's result what the script gets."""
    channel: "Channel" = field(init=False, repr=False)
    """Where it is under way. Set for those that scripts get, and deleted by whoever waits for them first."""

    result: Any = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    is_over: bool = field(default=False, init=False)
    told_s: float = field(default=math.inf, init=False)
    """When the round began in which the other ranks were told of it."""
