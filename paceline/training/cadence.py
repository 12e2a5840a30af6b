"""When all workers meet in a pause, and what for: the same decisions on every worker, from the same iterations."""

import math
from typing import final

from paceline.config import RunConfig

NEVER = 2**62
_AGREE_S = 1.0


@final
class Cadence:
    """Evaluations and checkpoints of one run, and the iteration that ends it.

    Iterations of asynchronous strategies jump: what was due within a jump is due after it, once.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.evaluates = False
        """Whether the script has registered an evaluation."""
        self.evaluated_at = -1
        self.checkpointed_at = -1
        self.next_pause = 0
        """The iteration at which all workers are to meet next, as `plan` found it."""
        self._agree_at = NEVER
        self._agree_interval = 1

    def is_over(self, iteration: int) -> bool:
        return iteration >= (self._config.max_steps or NEVER)

    def plan(self) -> None:
        """Set the next pause, from what has been done. Pauses alone change that, and so it is not asked every step."""
        config = self._config
        due = [config.max_steps or NEVER, self._agree_at]
        if config.eval_every is not None and self.evaluates:
            due.append((max(0, self.evaluated_at) // config.eval_every + 1) * config.eval_every)
        if config.checkpoint_every is not None:
            due.append((max(0, self.checkpointed_at) // config.checkpoint_every + 1) * config.checkpoint_every)
        self.next_pause = min(due)

    def agree_after(self, iteration: int, *, time_s: float, iterations_per_s: float) -> None:
        """Name the iteration at which all workers meet next to agree on whether to stop: in a second, or when the time
        is over, if that is sooner. Intervals at most double, since first steps are unlike later ones."""
        left_s = (self._config.max_time_s or math.inf) - time_s
        wanted = int(min(_AGREE_S, left_s) * iterations_per_s)
        self._agree_interval = max(1, min(wanted, 2 * self._agree_interval))
        self._agree_at = iteration + self._agree_interval

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
