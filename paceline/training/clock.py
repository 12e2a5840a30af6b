"""The training clock: it runs while a worker trains and stands still during evaluation, checkpoints and start-up."""

import time
from collections.abc import Callable
from typing import final

VIRTUAL = "virtual"
"""The engine whose seconds are of a simulated clock."""


def unit(engine: str) -> str:
    """The unit of times on that engine's clock.

    >>> unit("ray"), unit("virtual")
    ('s', 'virtual s')
    """
    return "virtual s" if engine == VIRTUAL else "s"


@final
class TrainingClock:
    """Seconds of training since `start`, pauses excluded. `time_s` is the source of time, real or virtual."""

    def __init__(self, *, time_s: Callable[[], float] = time.perf_counter) -> None:
        self._time_s = time_s
        self._elapsed_s = 0.0
        self._resumed_at_s: float | None = None

    @property
    def now_s(self) -> float:
        if self._resumed_at_s is None:
            return self._elapsed_s
        return self._elapsed_s + self._time_s() - self._resumed_at_s

    @property
    def is_running(self) -> bool:
        return self._resumed_at_s is not None

    def resume(self) -> None:
        if self._resumed_at_s is None:
            self._resumed_at_s = self._time_s()

    def pause(self) -> None:
        self._elapsed_s = self.now_s
        self._resumed_at_s = None

    def set(self, elapsed_s: float) -> None:
        """Continue from a checkpoint's time; the clock must stand."""
        self._elapsed_s = elapsed_s
