"""Mean and spread of curves over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_POINTS = 120
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """What one seed measured."""

    x: Floats
    """Rising; at least one point."""
    y: Floats
    holds_last: bool = False
    """What the curve is after its own end. True: its last value, as of a run that ended because it was good enough.
    False: unknown."""


@dataclass(frozen=True)
class Band:
    """A mean curve with the smallest and largest value of any seed; all of shape (points,)."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def band(curves: Sequence[Curve]) -> Band:
    """The mean of curves on a grid of their own points, thinned to `NUM_POINTS`.

    It ends where the first of those ends that do not hold their last value; if all do, with the longest.
    """
    first = max(curve.x[0] for curve in curves)
    unheld = [curve.x[-1] for curve in curves if not curve.holds_last]
    last = max(min(unheld) if unheld else max(curve.x[-1] for curve in curves), first)
    own = np.unique(np.concatenate([curve.x for curve in curves]))
    grid = own[(own >= first) & (own <= last)]
    if len(grid) > NUM_POINTS:
        grid = grid[np.unique(np.linspace(0, len(grid) - 1, NUM_POINTS).round().astype(int))]
    values = np.stack([np.interp(grid, curve.x, curve.y) for curve in curves])
    return Band(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0))
