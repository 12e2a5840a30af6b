"""Which combinations may be the best of a study: the table `comparison`, from what every run measured."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from paceline.config import Target, rises
from paceline.lab import chance
from paceline.lab.analysis import surest
from paceline.lab.chance import Arm, Comparison, Floats, Run
from paceline.lab.frames import FINISHED, table

TIME, COST, RATE, METRIC = "time_to_target_s", "cost_s_to_target", "samples_per_s", "last_metric"
_TO_TARGET = (TIME, COST)


def compare(trials: pd.DataFrame, summary: pd.DataFrame) -> pd.DataFrame:
    """One row a quantity and combination that has a value of it. A run that trained to its end and never reached the
    target would have taken longer than it ran; nothing is learnt from one that failed."""
    rows: list[dict[str, Any]] = []
    for name, study in trials.groupby("study", sort=False):
        for quantity in (TIME, COST, RATE, METRIC):
            rows += _rows(study, summary[summary["study"] == name], quantity)
    return table("comparison", rows)


def _rows(trials: pd.DataFrame, summary: pd.DataFrame, quantity: str) -> Iterator[dict[str, Any]]:
    """Values in the direction in which smaller is better; all but metrics by their logarithm."""
    sign = -1.0 if _more_is_better(trials, quantity) else 1.0
    runs = _runs(trials[trials["status"] == FINISHED], quantity, sign)
    found = chance.compare(runs)
    if not found.arms:
        return
    noticed = _noticed(trials, summary, found, quantity)
    margins = np.maximum(found.margins, noticed)
    best = found.may_be_best(among=_candidates(summary, found, quantity), noticed=noticed)
    leader = int(found.centres.argmin())
    first = trials.iloc[0]
    for index, arm in enumerate(found.arms):
        margin = float(margins[index, leader]) if index != leader else 0.0
        ends = [sign * (found.centres[index] + sign * off) for off in (0.0, -margin, margin)]
        typical, low, high = ends if quantity == METRIC else np.exp(ends)
        own = [run for run in runs if run.arm == arm]
        yield {
            "study": first["study"],
            "script": first["script"],
            "strategy": arm[0],
            "workers": arm[1],
            "quantity": quantity,
            "typical": typical,
            "low": low if np.isfinite(margin) else np.nan,
            "high": high if np.isfinite(margin) else np.nan,
            "may_be_best": arm in best,
            "spread": found.spread,
            "arrived": sum(run.has_arrived for run in own),
            "censored": sum(not run.has_arrived for run in own),
        }


def _more_is_better(trials: pd.DataFrame, quantity: str) -> bool:
    if quantity != METRIC:
        return quantity == RATE
    target, metric = str(trials["target"].iloc[0]), next((name for name in trials["metric"] if name), "")
    return Target.parse(target).rising if target else rises(metric)


def _runs(finished: pd.DataFrame, quantity: str, sign: float) -> list[Run]:
    """A target that was reached before the first step took no time, which has no logarithm: it enters as the shortest
    time that there is."""
    if quantity == METRIC:
        known = finished[np.isfinite(finished[METRIC])]
        return [Run(_arm(row), row.seed, sign * row.last_metric) for row in known.itertuples()]
    values = finished[quantity]
    has_arrived = values.notna()
    if quantity in _TO_TARGET:
        processes = finished["workers"] + finished["servers"] if quantity == COST else 1
        values = values.where(has_arrived, processes * finished["training_time_s"])
    least = values[values > 0].min() if (values > 0).any() else 1.0
    known = finished.assign(value=np.log(values.clip(lower=least)), arrived=has_arrived)
    known = known[np.isfinite(known["value"]) & (has_arrived | (quantity in _TO_TARGET))]
    return [Run(_arm(row), row.seed, sign * row.value, bool(row.arrived)) for row in known.itertuples()]


def _arm(row: Any) -> Arm:
    return str(row.strategy), int(row.workers)


def _candidates(summary: pd.DataFrame, found: Comparison, quantity: str) -> set[Arm]:
    if quantity not in _TO_TARGET:
        return set(found.arms)
    return {_arm(row) for row in surest(summary).itertuples()}


def _noticed(trials: pd.DataFrame, summary: pd.DataFrame, found: Comparison, quantity: str) -> Floats | float:
    """A time to the target is the time of an evaluation: nothing shorter than evaluations are apart is noticed."""
    if quantity not in _TO_TARGET:
        return 0.0
    known = {_arm(row): row.resolution_s for row in summary.itertuples()}
    apart_s = np.nan_to_num([known[arm] for arm in found.arms])
    if quantity == COST:
        servers = {_arm(row): row.servers for row in trials.itertuples()}
        apart_s = apart_s * [arm[1] + servers[arm] for arm in found.arms]
    noticed: Floats = np.log1p(np.maximum(apart_s[:, None], apart_s[None, :]) / np.exp(found.centres)[None, :])
    return noticed
