"""When all workers meet in a pause, and what for: the same decisions on every worker, from the same iterations."""

import math
from typing import final

from paceline.config import RunConfig

NEVER = 2**62
_LATE_FIRST = 256


@final
class Rhythm:
    """What is to come again after some time, in iterations. Intervals at most double, since first steps are unlike
    later ones.

    Args:
        first: the first interval, of which nobody can tell how long it takes.

    >>> rhythm = Rhythm()
    >>> [rhythm.next(iteration, wanted=5) for iteration in (0, 1, 3, 7)]
    [1, 3, 7, 12]
    """

    def __init__(self, first: int = 1) -> None:
        self._first, self._interval = first, 0

    def next(self, iteration: int, *, wanted: float) -> int:
        """The iteration at which it is to come next, `wanted` iterations from here if that is not too far."""
        self._interval = int(max(1, min(wanted, 2 * self._interval))) if self._interval else self._first
        return iteration + self._interval


@final
class Cadence:
    """Evaluations and checkpoints of one run, and the iteration that ends it.

    Iterations of asynchronous strategies jump: what was due within a jump is due after it, once.

    Args:
        waits: workers wait for each other at pauses alone, so that the first are not to come soon for nothing.
    """

    def __init__(self, config: RunConfig, *, waits: bool) -> None:
        self._config = config
        self.evaluates = False
        """Whether the script has registered an evaluation."""
        self.evaluated_at = -1
        self.checkpointed_at = -1
        self.next_pause = 0
        """The iteration at which all workers are to meet next, as `plan` found it."""
        self._meet_at = NEVER
        self._rhythm = Rhythm(first=_LATE_FIRST if waits else 1)

    def is_over(self, iteration: int) -> bool:
        return iteration >= (self._config.max_steps or NEVER)

    def plan(self, *, check_at: int) -> None:
        """Set the next pause, from what has been done. Pauses alone change that, and so it is not asked every step.

        Args:
            check_at: when workers are to compare their models, if nothing else has them meet before.
        """
        config = self._config
        due = [config.max_steps or NEVER, self._meet_at, check_at]
        if config.eval_every is not None and self.evaluates:
            due.append((max(0, self.evaluated_at) // config.eval_every + 1) * config.eval_every)
        if config.checkpoint_every is not None:
            due.append((max(0, self.checkpointed_at) // config.checkpoint_every + 1) * config.checkpoint_every)
        self.next_pause = min(due)

    def meet_in(self, wait_s: float, iteration: int, *, iterations_per_s: float) -> None:
        """Name the iteration at which all workers meet next for what goes by time; none if that is infinite."""
        self._meet_at = NEVER
        if wait_s < math.inf:
            self._meet_at = self._rhythm.next(iteration, wanted=wait_s * iterations_per_s)

    def is_evaluation_due(self, iteration: int, *, at_end: bool) -> bool:
        every = self._config.eval_every
        if not self.evaluates or iteration == self.evaluated_at:
            return False
        if at_end or every is None:
            return at_end
        return self.evaluated_at < 0 or iteration // every > self.evaluated_at // every

    def is_checkpoint_due(self, iteration: int, *, at_end: bool, is_late: bool) -> bool:
        """
        Args:
            is_late: whether the last checkpoint is so long ago that any pause is to take one, where no cadence is set.
        """
        every = self._config.checkpoint_every
        if iteration == self.checkpointed_at:
            return False
        if at_end or iteration == 0:
            return at_end
        return is_late if every is None else iteration // every > max(0, self.checkpointed_at) // every
