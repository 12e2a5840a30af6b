"""When a target counts as reached: once several evaluations in a row hold it, so that luck does not end a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from paceline.config import Target

NUM_SAMPLES = "num_samples"
"""What an evaluation may return beside its metrics: how many samples it looked at."""
MOST = 3
_LUCK = 0.05


def evaluations_needed(target: Target, num_samples: float | None) -> int:
    """The smallest number, up to `MOST`, of evaluations in a row that a model one standard error short of the target
    passes with probability below 5 %, if they were independent. 1 where nobody knows, as with a loss, or where the
    evaluation does not say its number of samples.

    >>> [evaluations_needed(Target.parse("accuracy=0.9"), n) for n in (None, 40, 10_000)]
    [1, 3, 2]
    """
    chance = _chance_of_passing(target, num_samples)
    if chance is None:
        return 1
    return next((num for num in range(1, MOST) if chance**num < _LUCK), MOST)


def _chance_of_passing(target: Target, num_samples: float | None) -> float | None:
    """The chance to pass by luck, one standard error below the target, with a share of so many samples (binomial)."""
    if num_samples is None or not num_samples >= 1 or not _is_share(target):
        return None
    from scipy.special import bdtrc  # here, as a run without it is not to wait for it

    wanted = target.value if target.rising else 1 - target.value
    error = math.sqrt(wanted * (1 - wanted) / num_samples)
    return float(bdtrc(math.ceil(wanted * num_samples - 1e-9) - 1, int(num_samples), max(0.0, wanted - error)))


def _is_share(target: Target) -> bool:
    return 0 < target.value < 1 and (target.rising or "error" in target.metric.lower())


@final
@dataclass
class Streak:
    """The evaluations in a row, up to the latest, that reach a target."""

    target: Target
    hold: int | None
    """How many are asked for; none: as many as `evaluations_needed` says."""
    num: int = 0
    began_s: float = 0.0
    """Time of the first of them, at which the target was reached if they are enough."""

    def add(self, metrics: Mapping[str, float], time_s: float) -> bool:
        """Count an evaluation; whether the target is held by now."""
        if not self.target.is_reached(metrics.get(self.target.metric, math.nan)):
            self.num = 0
            return False
        if self.num == 0:
            self.began_s = time_s
        self.num += 1
        return self.num >= self.needed(metrics)

    def needed(self, metrics: Mapping[str, float]) -> int:
        return self.hold or evaluations_needed(self.target, metrics.get(NUM_SAMPLES))
