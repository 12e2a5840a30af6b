"""When all workers meet in a pause, and what for: the same decisions on every worker, from the same iterations."""

import math
from collections.abc import Mapping
from typing import Any, final

from paceline.config import RunConfig
from paceline.interval import Count

NEVER = 2**62
_GROWTH, _WAITING_GROWTH = 2, 4
_DECIDED = ("evaluates", "is_beside", "checkpointed_at", "next_pause", "_meet_at")
_ROUNDING = 1e-6  # of iterations, in what is a whole number of them


@final
class Rhythm:
    """What is to come again after some time, in iterations. Intervals grow by a factor at most, since first steps are
    unlike later ones.

    Args:
        first: the first interval, of which nobody can tell how long it takes.
        growth: that factor.

    >>> rhythm = Rhythm()
    >>> [rhythm.next(iteration, wanted=5) for iteration in (0, 1, 3, 7)]
    [1, 3, 7, 12]
    """

    def __init__(self, first: int = 1, *, growth: int = _GROWTH) -> None:
        self._first, self._growth = first, growth
        self.interval = 0
        """The last one; 0: there was none."""

    def next(self, iteration: int, *, wanted: float) -> int:
        """The iteration at which it is to come next, `wanted` iterations from here if that is not too far."""
        self.interval = int(max(1, min(wanted, self._growth * self.interval))) if self.interval else self._first
        return iteration + self.interval


@final
class Cadence:
    """Evaluations and checkpoints of one run, and the iteration that ends it.

    Iterations of asynchronous strategies jump: what was due within a jump is due after it, once.

    Args:
        num_free_workers: how many workers there are, if they wait for each other at pauses alone: the first are to be
            few, and to come when each has taken some steps.
        settles_late: what a checkpoint holds may change after it, at the same iteration: the last one is taken again.
    """

    def __init__(self, config: RunConfig, *, num_free_workers: int = 0, settles_late: bool = False) -> None:
        self._config, self._settles_late = config, settles_late
        self.end = config.max_steps or NEVER
        """The iteration at which the run ends."""
        self.evaluates = False
        """Whether the script has registered an evaluation."""
        self.is_beside = False
        """Models are kept to be judged in pauses that come anyway, so that evaluations bring none about."""
        self.evaluated_at: Count | None = None
        """How far the run was at the last evaluation, or at the checkpoint that it goes on from."""
        self.checkpointed_at = -1
        self.next_pause = 0
        """The iteration at which all workers are to meet next, as `plan` found it."""
        self._meet_at = NEVER
        self._rhythm = Rhythm(2 * num_free_workers, growth=_WAITING_GROWTH) if num_free_workers else Rhythm()
        self._evaluation_rhythm = Rhythm()

    def state(self) -> dict[str, Any]:
        """What has been decided so far, as plain data: the same on every worker at every step."""
        return {
            **{name: getattr(self, name) for name in _DECIDED},
            "evaluated_at": None if self.evaluated_at is None else list(self.evaluated_at),
            "intervals": [self._rhythm.interval, self._evaluation_rhythm.interval],
        }

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Decide from here on as those do who gave this."""
        for name in _DECIDED:
            setattr(self, name, state[name])
        self.evaluated_at = None if state["evaluated_at"] is None else Count(*state["evaluated_at"])
        self._rhythm.interval, self._evaluation_rhythm.interval = state["intervals"]

    def meet_by(self, iteration: int) -> None:
        """All workers meet at this iteration, if not before."""
        self.next_pause = min(self.next_pause, iteration)

    def plan(self, now: Count, *, check_at: int, iterations_per_s: float = 0.0) -> None:
        """Set the next pause, from what has been done. Pauses alone change that, and so it is not asked every step.

        Args:
            check_at: when workers are to compare their models, if nothing else has them meet before.
        """
        config = self._config
        due = [self.end, self._meet_at, check_at]
        if self.evaluates and not self.is_beside:
            due.append(self._next_evaluation(now, iterations_per_s))
        if config.checkpoint_every is not None:
            due.append((max(0, self.checkpointed_at) // config.checkpoint_every + 1) * config.checkpoint_every)
        self.next_pause = min(due)

    def _next_evaluation(self, now: Count, iterations_per_s: float) -> int:
        """The iteration at which one will be due, by how many samples, batches or seconds iterations have taken; before
        the first one nobody knows, and a pause soon after tells."""
        every = self._config.eval_every
        if every is None:
            return NEVER
        left = every.left(self.evaluated_at or Count(), now)
        if every.unit == "iterations":
            return now.iterations + int(left)
        if every.unit == "s":
            return self._evaluation_rhythm.next(now.iterations, wanted=math.ceil(left * iterations_per_s))
        if not now.iterations or not now.of(every.unit):
            return now.iterations + 1
        return now.iterations + max(1, math.ceil(left * now.iterations / now.of(every.unit) - _ROUNDING))

    def meet_in(self, wait_s: float, iteration: int, *, iterations_per_s: float) -> None:
        """Name the iteration at which all workers meet next for what goes by time; none if that is infinite."""
        self._meet_at = NEVER
        if wait_s < math.inf:
            self._meet_at = self._rhythm.next(iteration, wanted=wait_s * iterations_per_s)

    def is_evaluation_due(self, now: Count, *, at_end: bool) -> bool:
        every, before = self._config.eval_every, self.evaluated_at
        if not self.evaluates or (before is not None and now.iterations == before.iterations):
            return False
        if at_end or every is None:
            return at_end
        return before is None or (not self.is_beside and every.has_come(before, now))

    def is_checkpoint_due(self, iteration: int, *, at_end: bool, is_late: bool) -> bool:
        """
        Args:
            is_late: whether the last checkpoint is so long ago that any pause is to take one, where no cadence is set.
        """
        every = self._config.checkpoint_every
        if iteration == self.checkpointed_at:
            return at_end and self._settles_late
        if at_end or iteration == 0:
            return at_end
        return is_late if every is None else iteration // every > max(0, self.checkpointed_at) // every
