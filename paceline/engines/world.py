"""What an engine gives the script of one worker, and where the script finds it."""

from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import Store

from paceline.checkpoint import Checkpoint
from paceline.comm.alone import AloneCollective
from paceline.config import RunConfig
from paceline.errors import UsageError
from paceline.membership import Membership
from paceline.records import NullReporter, Reporter
from paceline.strategies.base import Context, Strategy
from paceline.strategies.single import Single


@dataclass
class World:
    """One worker's surroundings. `at_end` is called in order once the script has returned; `release` in the end, also
    where the script has failed."""

    context: Context
    strategy: Strategy
    config: RunConfig
    reporter: Reporter
    checkpoint: Checkpoint | None = None
    store: Store | None = None
    """Where workers on several hosts find one another; none where all are on one."""
    address: str = ""
    """The address at which workers on other hosts reach this one; empty where there are none, or the environment says
    it."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    at_release: list[Callable[[], None]] = field(default_factory=list)
    """Gives back files and hooks; what fails in it is no failure of the run."""
    progress: Callable[[], int] = staticmethod(lambda: 0)
    """The worker's step, for those who ask from outside."""
    awaits_others: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the worker waits in a pause, or at its end, for workers that have steps to go until there."""
    has_ended: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the run has, so that loaders give nothing more."""
    epoch: Callable[[], int] = staticmethod(lambda: 0)
    """Which epoch of its data the worker is in."""
    worker: Any = None
    """What the script was given for it, once it has asked."""

    def release(self) -> None:
        for release in self.at_release:
            with suppress(Exception):
                release()


_current: World | None = None
_here: ContextVar[World | None] = ContextVar("paceline_world", default=None)


def alone(*, seed: int = 0) -> World:
    """A world of one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    context = Context(
        rank=0,
        membership=Membership.first(1),
        local_rank=0,
        local_size=1,
        device=device,
        collective=AloneCollective(),
    )
    return World(context, Single(), RunConfig(seed=seed), NullReporter())


def current() -> World | None:
    """The world that the caller's script runs in, here or in this process; none where no engine started it."""
    return _here.get() or _current


def enter(world: World | None) -> None:
    """Set the process's world before its script runs."""
    global _current
    _current = world


def enter_here(world: World | None) -> None:
    """Set the world of the caller's context alone, where several workers live in one process."""
    _here.set(world)


def device_of(config: RunConfig) -> torch.device:
    """The device that all workers compute on. Raises UsageError if this machine has none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no GPU; use --device cpu")
    uses_cuda = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", 0) if uses_cuda else torch.device("cpu")
