"""Whether two means over seeds differ by more than chance explains.

Student's two-sample t with pooled variance (Snedecor and Cochran, Statistical Methods, chapter 6): with two or three
seeds a mean is known badly, and the quantile of t, unlike two standard errors, says how badly.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Quantiles of Student's t that leave out 5 %, both ends together, for 1, 2, ... degrees of freedom. Beyond the last
# one, that one: a little too careful, by 2.228 for 1.960.
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Sample:
    """What is known of a quantity from some seeds."""

    mean: float
    std: float
    """NaN where there are fewer than two values."""
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        mean = statistics.fmean(values) if values else math.nan
        return cls(mean, statistics.stdev(values) if len(values) > 1 else math.nan, len(values))


def margin(one: Sample, other: Sample) -> float:
    """By how much the means may differ by chance, at 95 % confidence; 0 where no spread is known.

    >>> round(margin(Sample.of([10.0, 12.0]), Sample.of([20.0, 22.0])), 2)  # 4.303 standard errors of sqrt(2)
    6.09
    """
    freedom = [max(0, sample.num - 1) for sample in (one, other)]
    if sum(freedom) == 0 or min(one.num, other.num) == 0:
        return 0.0
    squares = sum(n * sample.std**2 for n, sample in zip(freedom, (one, other), strict=True) if n > 0)
    error = math.sqrt(squares / sum(freedom) * (1 / one.num + 1 / other.num))
    return _QUANTILES[min(sum(freedom), len(_QUANTILES)) - 1] * error
