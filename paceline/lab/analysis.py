"""From trials to what a study says: mean and spread over seeds, speed-up, efficiency, Amdahl's fit, and reliability.

A speed-up is the time one worker takes to the target, over the time that n workers take.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from paceline.lab import amdahl
from paceline.lab.frames import FAILED, FINISHED, QUANTITIES, table

_DERIVED = ("speedup", "efficiency")
_ALIKE = ("unit", "engine", "cluster")  # in all trials of a combination

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
    values: list[float]
    num_pairs: int
    """Seeds that reached the target in both, with a value each. 0: one value, the ratio of other seeds' mean times."""


def summarise(trials: pd.DataFrame) -> pd.DataFrame:
    """One row a strategy and number of workers, in the order of the trials.

    Quantities of the target are over the seeds that reached it, all others over those that finished. A standard
    deviation needs two seeds.
    """
    rows = []
    for _, study in trials.groupby("study", sort=False):
        bases = {strategy: base_of(study, strategy) for strategy in study["strategy"].unique()}
        for (strategy, _), group in study.groupby(["strategy", "workers"], sort=False):
            rows.append(_row(group, bases[strategy]))
    return table("summary", rows)


def _row(group: pd.DataFrame, base: Base | None) -> dict[str, Any]:
    first = group.iloc[0]
    strategy, workers = first["strategy"], int(first["workers"])
    finished = group[group["status"] == FINISHED]
    times_s = times_of(group, strategy=strategy, workers=workers)
    ratios = speedups(base.times_s, times_s) if base is not None else Speedups([], 0)
    num_processes = workers + int(first["servers"])  # a server's place is paid for as well
    per_process = base.workers / num_processes if base is not None else math.nan
    values = {
        **{quantity: _values(finished, quantity) for quantity in QUANTITIES if quantity not in _DERIVED},
        "speedup": ratios.values,
        "efficiency": [value * per_process for value in ratios.values],
    }
    spreads = [_spread(quantity, values[quantity]) for quantity in QUANTITIES]
    return {
        **{name: first[name] for name in ("study", "script", "strategy", "workers", *_ALIKE)},
        "seeds": len(finished),
        "failed": int((group["status"] == FAILED).sum()),
        "reached": int(group["reached"].sum()),
        **{name: value for spread in spreads for name, value in spread.items()},
        "resolution_s": group["resolution_s"].mean(),
        "speedup_pairs": ratios.num_pairs,
        "base_strategy": base.strategy if base is not None else "",
        "base_workers": base.workers if base is not None else 0,
    }


def _values(finished: pd.DataFrame, quantity: str) -> list[float]:
    """By seed. Of a target, those that reached it; of anything else all, so that a seed that diverged is not hidden."""
    values = finished[quantity]
    return list(values.dropna() if "to_target" in quantity else values)


def _spread(quantity: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, least, greatest and standard deviation; NaN of no values, and of any that is not finite."""
    if not all(map(math.isfinite, values)):
        values = ()
    return {
        quantity: statistics.fmean(values) if values else math.nan,
        f"{quantity}_low": min(values, default=math.nan),
        f"{quantity}_high": max(values, default=math.nan),
        f"{quantity}_std": statistics.stdev(values) if len(values) > 1 else math.nan,
    }


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


def fit_amdahl(summary: pd.DataFrame) -> pd.DataFrame:
    """One row a strategy that at least three numbers of workers brought to the target, against one worker's time.

    The law knows no slowing down, so the fit is to the numbers of workers up to the fastest. The fraction's bounds are
    the fits of the highest and of the lowest speed-ups.
    """
    rows = []
    for (study, script, strategy), group in summary.groupby(["study", "script", "strategy"], sort=False):
        points = group[group["speedup"].notna() & (group["base_workers"] == 1)]
        most = int(points.loc[points["speedup"].idxmax(), "workers"]) if len(points) else 0
        points = points[points["workers"] <= most]
        if len(points) < amdahl.MIN_POINTS:
            continue
        workers = points["workers"].tolist()
        fits = {bound: amdahl.fit(workers, points[f"speedup{bound}"].tolist()) for bound in ("", "_low", "_high")}
        rows.append(
            {
                "study": study,
                "script": script,
                "strategy": strategy,
                "workers": most,
                "serial_fraction": fits[""].serial_fraction,
                "serial_fraction_low": fits["_high"].serial_fraction,
                "serial_fraction_high": fits["_low"].serial_fraction,
                "residual": fits[""].residual,
            }
        )
    return table("amdahl", rows)


def num_tried(row: Any) -> int:
    """Trials of a row of the summary that have ended, well or not."""
    return int(row["seeds"] + row["failed"])


def reliability(row: Any) -> float:
    """The part of its seeds that brought a row's combination to the target. A trial that failed did not."""
    return float(row["reached"] / num_tried(row)) if num_tried(row) else 0.0


def surest(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows that reached the target with the largest part of their seeds, which alone may win.

    An average over the few seeds that got there does not beat a sure thing.
    """
    reached = summary[summary["reached"] > 0]
    sure = reached.apply(reliability, axis="columns", result_type="reduce")
    return reached[sure == sure.max()] if len(reached) else reached
