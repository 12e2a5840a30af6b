"""Amdahl's law, fitted to measured speed-ups.

Amdahl, "Validity of the single processor approach to achieving large scale computing capabilities", AFIPS 1967: if a
part f of one worker's time cannot be shared out, n workers are S(n) = 1 / (f + (1 - f) / n) times as fast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_POINTS = 3


@dataclass(frozen=True)
class Fit:
    """The serial fraction that explains the measurements best."""

    serial_fraction: float
    """The part that is not sped up, in 0..1; 0 also where the speed-up is more than linear."""
    residual: float
    """Root mean square of the measured speed-ups' distance from the fitted ones."""


def speedup(workers: float, *, serial_fraction: float) -> float:
    """S(n); without bound for infinitely many workers and nothing serial.

    >>> speedup(4, serial_fraction=0.0)
    4.0
    >>> speedup(math.inf, serial_fraction=0.25)
    4.0
    """
    relative_time = serial_fraction + (1 - serial_fraction) / workers
    return 1 / relative_time if relative_time > 0 else math.inf


def fit(workers: Sequence[int], speedups: Sequence[float]) -> Fit:
    """Least squares on relative times, 1 / S(n) = f + (1 - f) / n, in which f is linear and so has a closed form.

    Times rather than speed-ups, because a time is what was measured, with an error that does not grow with n. Raises
    ValueError if no number of workers is above 1, or there are not as many speed-ups.
    """
    points = list(zip(workers, speedups, strict=True))
    shareable = [1 - 1 / n for n, _ in points]
    lost = [1 / s - 1 / n for n, s in points]
    weight = sum(x * x for x in shareable)
    if weight == 0:
        raise ValueError("a fit needs a number of workers above 1")
    fraction = sum(x * y for x, y in zip(shareable, lost, strict=True)) / weight
    fraction = min(1.0, max(0.0, fraction))
    squares = [(s - speedup(n, serial_fraction=fraction)) ** 2 for n, s in points]
    return Fit(fraction, math.sqrt(sum(squares) / len(squares)))
