"""What a shard says of contributions that it has closed: to workers, to records, and to its copies."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from paceline.server.whole_updates import Round, Took

Groups = Sequence[Mapping[str, Any]]
"""Hyperparameters of an optimizer's groups, without their parameters."""


class Answer(NamedTuple):
    """A worker's exchange is complete: it is to be sent the current parameters."""

    worker: int
    iteration: int
    clock: int
    staleness: int
    """Updates between the worker's last pull and its gradient; -1 if the gradient was not applied, or not yet."""
    stop: bool
    admitted: bool
    """False: answered only so that the worker can take part in a pause or end; it must ask again before it goes on."""
    contributors: tuple[int, ...] | None = None
    """What the worker must tell the other shards (`Shard.follow`): whose gradients formed the clock before `clock`."""
    took: tuple[Took, ...] = ()
    """As `Reply.took`."""


class Applied(NamedTuple):
    """One gradient that became (part of) an update."""

    iteration: int
    """The update's number, from 1."""
    worker: int
    clock: int
    staleness: int


class Closed(NamedTuple):
    """What a shard is about to make of the contributions to one clock, so that a copy of the shard can do the same."""

    gradients: Sequence[Tensor] | None
    """As the optimizer gets them, which may overwrite them; None: the clock is void, or updates are over."""
    contributors: Mapping[int, tuple[int, int]]
    """Of each worker its contribution's clock, and its staleness."""
    clocks: Mapping[int, tuple[int, int]]
    """As `Shard.clocks` gives them after it."""
    groups: Mapping[int, Groups]
    """By worker: hyperparameters that have come with its contribution."""
    stop: bool
    round: Round | None = None
    """Where updates may take several: the gradients are those of this one, of which there may be none."""
