"""What an engine gives the script of one worker, and where the script finds it."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from paceline.checkpoint import Checkpoint
from paceline.config import RunConfig
from paceline.records import Reporter
from paceline.strategies.base import Context, Strategy


@dataclass
class World:
    """One worker's surroundings. `at_end` is called in order once the script has returned."""

    context: Context
    strategy: Strategy
    config: RunConfig
    reporter: Reporter
    checkpoint: Checkpoint | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    progress: Callable[[], int] = staticmethod(lambda: 0)
    """The worker's step, for those who ask from outside."""
    awaits_others: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the worker waits in a pause, or at its end, for workers that have steps to go until there."""
    worker: Any = None
    """What the script was given for it, once it has asked."""


_current: World | None = None
_here: ContextVar[World | None] = ContextVar("paceline_world", default=None)


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
