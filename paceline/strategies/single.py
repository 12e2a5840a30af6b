"""One worker, no exchange: the baseline that every speed-up is measured against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor
from torch.nn.utils import get_total_norm

from paceline.comm.base import Timing
from paceline.errors import UsageError
from paceline.server.admission import AdmissionRule
from paceline.server.state import export_state, import_state
from paceline.strategies.base import Context, Replica, StepOutcome, Strategy, Synchronizer, non_finite
from paceline.strategies.replica import is_skipped_by_scaler


@final
@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """The script as it is, on one worker.

    >>> Single().num_servers()
    0
    """

    summary: ClassVar[str] = "one worker, no exchange: the baseline"

    def validate(self) -> None:
        pass

    def check(self, *, num_workers: int) -> None:
        if num_workers != 1:
            raise UsageError(f"strategy single runs on 1 worker, not {num_workers}; use all-reduce or ps-bsp")

    def is_lock_step(self) -> bool:
        return True

    def is_synchronous(self) -> bool:
        return True

    def num_servers(self) -> int:
        return 0

    def admission_rule(self, *, num_workers: int) -> AdmissionRule | None:
        return None

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return _SingleSynchronizer(self, context, replica)


@final
class _SingleSynchronizer(Synchronizer):
    def __init__(self, strategy: Single, context: Context, replica: Replica) -> None:
        self._strategy = strategy
        self._rank = context.rank
        self._replica = replica
        self._iteration = 0

    @property
    def timings(self) -> tuple[Timing, ...]:
        return ()

    def set_weight(self, weight: float) -> None:
        pass

    def set_synchronizing(self, on: bool) -> bool:
        return True

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        is_skipped = is_skipped_by_scaler(self._replica.optimizer)
        culprit = None if is_skipped or self._strategy.nonfinite == "allow" else self._find_nonfinite()
        if culprit is not None and self._strategy.nonfinite == "raise":
            raise non_finite(rank=self._rank, step=self._iteration + 1, parameter=culprit)
        if culprit is None:
            update()  # which a scaler skips by itself
        is_applied = culprit is None and not is_skipped
        self._iteration += is_applied
        return StepOutcome(self._iteration, stop=self.stop_vote(), staleness=0 if is_applied else -1)

    def wait_for_admission(self, *, pause_at: int) -> StepOutcome:
        return StepOutcome(self._iteration)

    def refresh(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def optimizer_state(self) -> dict[str, Tensor]:
        return export_state(self._replica.optimizer, self._replica.parameters)

    def restore(self, state: dict[str, Tensor], *, iteration: int) -> None:
        import_state(self._replica.optimizer, self._replica.parameters, state)
        self._iteration = iteration

    def close(self) -> None:
        pass

    def _find_nonfinite(self) -> str | None:
        gradients = [parameter.grad for parameter in self._replica.parameters if parameter.grad is not None]
        # One fused pass over all gradients; the norm may overflow where no gradient does, hence the second look.
        if not gradients or math.isfinite(get_total_norm(gradients).item()):
            return None
        for parameter, spec in zip(self._replica.parameters, self._replica.specs, strict=True):
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return spec.name
        return None
