"""Calls the callbacks of a backward pass after torch's engine has returned, where a worker can wait."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from paceline.errors import UsageError


@final
class BackwardEnds:
    """Stands in for torch's engine, which calls `queue_callback`'s callbacks from inside itself.

    A worker that waited there would leave the engine's state, which belongs to the thread, to the next worker.
    """

    def __init__(self) -> None:
        self._engine: Any = torch.autograd.Variable._execution_engine
        self._queued: list[list[Callable[[], None]]] = []  # a list for each backward pass under way, the innermost last

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Torch's Python code calls this one instead of its engine."""
        torch.autograd.Variable._execution_engine = self  # type: ignore[assignment]
        try:
            # Else hooks on a GPU's gradients would run in a thread of that device.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            torch.autograd.Variable._execution_engine = self._engine

    def is_outside(self) -> bool:
        """Whether no backward pass is under way."""
        return not self._queued

    def require_outside(self) -> None:
        """Raises UsageError if a backward pass is under way."""
        if self._queued:
            raise UsageError(
                "on the virtual engine nothing can be waited for in the middle of a backward pass; wait for what a "
                "hook has started when backward() has returned, and give torch.utils.checkpoint use_reentrant=False"
            )

    def queue_callback(self, callback: Callable[[], None]) -> None:
        self._queued[-1].append(callback)

    def run_backward(self, *arguments: Any, **settings: Any) -> Any:
        self._queued.append([])
        try:
            result = self._engine.run_backward(*arguments, **settings)
        finally:
            callbacks = self._queued.pop()
        for callback in callbacks:
            callback()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
