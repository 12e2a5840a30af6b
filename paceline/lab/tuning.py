"""Fair tuning: every combination gets its own best script options, by as many runs as any other, on a seed that is not
judged."""

import math
from collections.abc import Mapping
from pathlib import Path

from paceline.config import rises
from paceline.lab.reaching import first_reaching
from paceline.lab.spec import StudySpec, Trial
from paceline.records import EvaluationRecord, read_records
from paceline.training.holding import NUM_SAMPLES

Choice = Mapping[tuple[str, int], str]
"""The setting of each strategy's text and number of workers."""


def choose(spec: StudySpec, finished: Mapping[Trial, Path]) -> Choice:
    """The best setting of each combination, of the trials that finished: the first to the target; where none got there,
    the one that came closest."""
    ranked: dict[tuple[str, int], list[tuple[tuple[float, float], str]]] = {}
    for trial in spec.tuning_trials:
        if trial in finished:
            found = ranked.setdefault((trial.variant.text, trial.workers), [])
            found.append((_rank(spec, trial, read_records(finished[trial], EvaluationRecord)), trial.setting))
    return {arm: min(found, key=lambda entry: entry[0])[1] for arm, found in ranked.items()}


def _rank(spec: StudySpec, trial: Trial, evaluations: list[EvaluationRecord]) -> tuple[float, float]:
    """Time to the target, then distance of the last metric; less is better."""
    target = spec.config(trial.seed).target
    metric = target.metric if target is not None else _first_metric(evaluations)
    is_rising = target.rising if target is not None else rises(metric)
    values = [e.metrics[metric] for e in evaluations if metric in e.metrics]
    last = values[-1] if values and math.isfinite(values[-1]) else -math.inf if is_rising else math.inf
    reaching = first_reaching(evaluations, target, spec.hold) if target is not None else None
    return reaching.evaluation.time_s if reaching is not None else math.inf, -last if is_rising else last


def _first_metric(evaluations: list[EvaluationRecord]) -> str:
    return next((name for e in evaluations for name in e.metrics if name != NUM_SAMPLES), "")
