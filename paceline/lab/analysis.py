"""From trials to what a study says: mean and spread over seeds, speed-up, efficiency, and Amdahl's fit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd

from paceline.lab import amdahl, speedup
from paceline.lab.frames import FAILED, FINISHED, QUANTITIES, table
from paceline.lab.speedup import Base, Speedups

_DERIVED = ("speedup", "efficiency")
_ALIKE = ("unit", "engine", "cluster")  # in all trials of a combination


def summarise(trials: pd.DataFrame) -> pd.DataFrame:
    """One row a strategy and number of workers, in the order of the trials.

    Quantities of the target are over the seeds that reached it, all others over those that finished. A standard
    deviation needs two seeds.
    """
    rows = []
    for _, study in trials.groupby("study", sort=False):
        bases = {strategy: speedup.base_of(study, strategy) for strategy in study["strategy"].unique()}
        for (strategy, _), group in study.groupby(["strategy", "workers"], sort=False):
            rows.append(_row(group, bases[strategy]))
    return table("summary", rows)


def _row(group: pd.DataFrame, base: Base | None) -> dict[str, Any]:
    first = group.iloc[0]
    strategy, workers = first["strategy"], int(first["workers"])
    finished = group[group["status"] == FINISHED]
    times_s = speedup.times_of(group, strategy=strategy, workers=workers)
    speedups = speedup.speedups(base.times_s, times_s) if base is not None else Speedups([], 0)
    per_worker = base.workers / workers if base is not None else math.nan
    values = {
        **{quantity: _values(finished, quantity) for quantity in QUANTITIES if quantity not in _DERIVED},
        "speedup": speedups.values,
        "efficiency": [value * per_worker for value in speedups.values],
    }
    spreads = [_spread(quantity, values[quantity]) for quantity in QUANTITIES]
    return {
        **{name: first[name] for name in ("study", "script", "strategy", "workers", *_ALIKE)},
        "seeds": len(finished),
        "failed": int((group["status"] == FAILED).sum()),
        "reached": int(group["reached"].sum()),
        **{name: value for spread in spreads for name, value in spread.items()},
        "resolution_s": group["resolution_s"].mean(),
        "speedup_pairs": speedups.num_pairs,
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
