"""One worker, no exchange: the baseline that every speed-up is measured against."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from paceline.comm.base import Timing
from paceline.errors import UsageError
from paceline.strategies.base import Context, StepOutcome, Strategy, Synchronizer
from paceline.strategies.finite import checked, step_alone
from paceline.strategies.replica import Replica, cannot_evaluate
from paceline.strategies.traits import Traits


@final
@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """The script as it is, on one worker.

    >>> Single().traits.num_servers
    0
    """

    @property
    def traits(self) -> Traits:
        return Traits(lock_step=True, tells_stop=True, holds_rows=True, traffic=())

    def check(self, *, num_workers: int) -> None:
        if num_workers != 1:
            raise UsageError(f"strategy single runs on 1 worker, not {num_workers}; use all-reduce or ps-bsp")

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return _SingleSynchronizer(self, context, replica)


@final
class _SingleSynchronizer(Synchronizer):
    def __init__(self, strategy: Single, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._nonfinite = strategy.nonfinite

    @property
    def timings(self) -> tuple[Timing, ...]:
        return ()

    def evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if self.replica.tables:
            raise cannot_evaluate(self.replica.optimizer)
        return checked(closure, self.replica, self._nonfinite, rank=self.context.rank, step=self.iteration + 1)

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        applies = step_alone(self, update, self._nonfinite, step=self.iteration + 1)
        for table in self.replica.tables:
            table.update() if applies else table.drop_gradients()
        self.iteration += applies
        stop = self.stop_vote()
        return tuple.__new__(StepOutcome, (self.iteration, stop, 0 if applies else -1, True, False))
