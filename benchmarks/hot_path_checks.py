"""What watches over a script at every step: hot_path.py leaves it out, or counts the core's time that it takes."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from paceline.strategies import all_reduce, combining, same_steps, serving
from paceline.strategies.combining import Combining
from paceline.strategies.gradient_reads import GradientReads
from paceline.strategies.held_state import HeldState
from paceline.strategies.looks import Window
from paceline.strategies.server_owned import ServerOwned
from paceline.strategies.untouched import Untouched
from paceline.training import agreement, divisors
from paceline.training.full_batches import FullBatches
from paceline.training.kept_batches import Copies
from paceline.training.same_gradients import SameGradients

OPTIMIZERS = sys.modules[torch.optim.Optimizer.__module__]
"""Which torch.optim does not show."""


def nothing(*_: Any, **__: Any) -> None:
    """In the place of a check."""


CHECKS: tuple[tuple[Any, str, Any], ...] = (
    (all_reduce, "require_same_parameters", nothing),
    *((serving, f"require_{what}", nothing) for what in ("all_parameters", "no_hooks", "same_attributes")),
    (HeldState, "require_untouched", nothing),
    (ServerOwned, "require_untouched", nothing),
    (ServerOwned, "require_in_place", nothing),
    *((Untouched, name, nothing) for name in ("accept", "accept_values")),
    *((Window, name, lambda self: b"") for name in ("read", "move_on")),
    (Combining, "_versions", lambda self: []),
    (combining, "digest", lambda tensors: ""),
    *((GradientReads, name, nothing) for name in ("begin", "end")),
    (same_steps, "digest", lambda tensors: ""),
    (serving, "next_look", lambda step: step + 1),
    *((SameGradients, name, nothing) for name in ("begin", "hand_out", "_take", "close")),
    (divisors, "_divisors_in", lambda roots: []),
    (FullBatches, "require", nothing),
    (Copies, "add", nothing),
    (agreement, "digest", lambda tensors: ""),
    (agreement, "settings_of", lambda optimizer: ()),
)
"""What looks at every step, or in pauses, whether the script does what all workers can: each with what stands in."""


@contextmanager
def unchecked() -> Iterator[None]:
    """Nobody looks meanwhile."""
    with ExitStack() as stack:
        for home, name, instead in CHECKS:
            stack.enter_context(patch.object(home, name, instead))
        stack.enter_context(unhooked())
        yield


def unhooked() -> AbstractContextManager[Any]:
    """No hook on all optimizers' steps, as in a process that does not use Paceline."""
    return patch.object(OPTIMIZERS, "_global_optimizer_pre_hooks", OrderedDict())


class Spent:
    """The core's time that checks take, in a run that makes them; what other programs take is not in it."""

    def __init__(self) -> None:
        self.total_s, self._depth = 0.0, 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count meanwhile. With each call it also counts half a call of the clock, about 0.3 us."""
        with ExitStack() as stack:
            for home, name, _ in CHECKS:
                stack.enter_context(patch.object(home, name, self._timed(getattr(home, name))))
            hooks = {key: self._timed(hook) for key, hook in OPTIMIZERS._global_optimizer_pre_hooks.items()}
            stack.enter_context(patch.object(OPTIMIZERS, "_global_optimizer_pre_hooks", OrderedDict(hooks)))
            yield

    def _timed(self, check: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            if self._depth:
                return check(*arguments, **settings)
            self._depth = 1
            time.thread_time()  # what it takes to find the clock after a backward pass is no check's
            start_s = time.thread_time()
            try:
                return check(*arguments, **settings)
            finally:
                self.total_s += time.thread_time() - start_s
                self._depth = 0

        return call
