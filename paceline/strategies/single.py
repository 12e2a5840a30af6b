"""One worker, no exchange: the baseline that every speed-up is measured against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

from torch.nn.utils import get_total_norm

from paceline.comm.base import Timing
from paceline.errors import UsageError
from paceline.strategies.base import Context, Replica, StepOutcome, Strategy, Synchronizer, non_finite
from paceline.strategies.replica import is_skipped_by_scaler
from paceline.strategies.traits import Traits


@final
@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """The script as it is, on one worker.

    >>> Single().traits.num_servers
    0
    """

    summary: ClassVar[str] = "one worker, no exchange: the baseline"

    @property
    def traits(self) -> Traits:
        return Traits(lock_step=True, tells_stop=True, traffic=())

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

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        is_skipped = is_skipped_by_scaler(self.replica.optimizer)
        culprit = None if is_skipped or self._nonfinite == "allow" else self._find_nonfinite()
        if culprit is not None and self._nonfinite == "raise":
            raise non_finite(rank=self.context.rank, step=self.iteration + 1, parameter=culprit)
        if culprit is None:
            update()  # which a scaler skips by itself
        is_applied = culprit is None and not is_skipped
        self.iteration += is_applied
        return StepOutcome(self.iteration, stop=self.stop_vote(), staleness=0 if is_applied else -1)

    def _find_nonfinite(self) -> str | None:
        gradients = [parameter.grad for parameter in self.replica.parameters if parameter.grad is not None]
        # One fused pass over all gradients; the norm may overflow where no gradient does, hence the second look.
        if not gradients or math.isfinite(get_total_norm(gradients).item()):
            return None
        for parameter, spec in zip(self.replica.parameters, self.replica.specs, strict=True):
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return spec.name
        return None
