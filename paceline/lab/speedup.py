"""Speed-up: the time one worker takes to the target, over the time that n workers take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

Times = Mapping[int, float]
"""Seconds to the target by seed, of those seeds that reached it."""


@dataclass(frozen=True)
class Base:
    """What a strategy's speed-ups are measured against."""

    strategy: str
    workers: int
    times_s: Times


@dataclass(frozen=True)
class Speedups:
    """Of one strategy on one number of workers."""

    values: list[float]
    num_pairs: int
    """Seeds that reached the target in both, with a value each. 0: one value, the ratio of other seeds' mean times."""


def times_of(trials: pd.DataFrame, *, strategy: str, workers: int) -> dict[int, float]:
    """Seconds to the target of one combination, by seed; without the seeds that did not reach it."""
    chosen = trials[(trials["strategy"] == strategy) & (trials["workers"] == workers) & trials["reached"]]
    return dict(zip(chosen["seed"].tolist(), chosen["time_to_target_s"].tolist(), strict=True))


def base_of(trials: pd.DataFrame, strategy: str) -> Base | None:
    """The same strategy on one worker; where that was not run or never got there, `single`; else the same strategy on
    the fewest workers that got there. None: nobody did."""
    own = sorted(trials.loc[trials["strategy"] == strategy, "workers"].unique().tolist())
    for name, workers in [(strategy, 1), ("single", 1), *((strategy, workers) for workers in own)]:
        times_s = times_of(trials, strategy=name, workers=workers)
        if times_s:
            return Base(name, workers, times_s)
    return None


def speedups(base: Times, times_s: Times) -> Speedups:
    """Pairs of the same seed, which share the initial model; where no seed reached the target in both, of the means.

    A target that is reached before the first step leaves nothing to speed up.
    """
    before_s, after_s = ({seed: s for seed, s in times.items() if s > 0} for times in (base, times_s))
    common = [seed for seed in after_s if seed in before_s]
    if common:
        return Speedups([before_s[seed] / after_s[seed] for seed in common], len(common))
    if not (before_s and after_s):
        return Speedups([], 0)
    return Speedups([statistics.fmean(before_s.values()) / statistics.fmean(after_s.values())], 0)
