"""A study's tables, from the records in its trials' directories."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import Target, rises
from paceline.errors import UsageError
from paceline.lab import analysis, runner, step_totals
from paceline.lab.frames import FINISHED, MISSING, Frames, table
from paceline.lab.reaching import first_reaching
from paceline.lab.runner import TrialOutcome
from paceline.lab.spec import StudySpec, Trial
from paceline.lab.step_totals import StepTotals
from paceline.lab.tuning import Choice
from paceline.records import EvaluationRecord, read_records
from paceline.running import manifest
from paceline.training.holding import NUM_SAMPLES, Streak

_Rows = Mapping[str, list[dict[str, Any]]]  # what has been read so far, by table
_READ = ("trials", "evaluations", "workers", "staleness", "pace")


def build(spec: StudySpec, directory: Path, *, name: str) -> Frames:
    """Read all trials of a study. Those that failed or were not run yet are rows of `trials` and of nothing else.
    Raises UsageError, which names the file, if a trial's records are damaged."""
    rows: _Rows = {name: [] for name in _READ}
    outcomes, choice = runner.outcomes(directory, spec.trials), runner.tuned(spec, directory)
    for trial in spec.trials:
        outcome = outcomes.get(trial, TrialOutcome(MISSING, "", 0.0))
        key = _key(spec, trial, name)
        if outcome.status != FINISHED:
            rows["trials"].append({**key, **_facts(spec, trial, outcome, choice)})
            continue
        facts = {**key, **_facts(spec, trial, outcome, choice)}
        _read(rows, spec, trial, facts, key, runner.directory_of(directory, trial))
    read = {name: table(name, found) for name, found in rows.items()}
    summary = analysis.summarise(read["trials"])
    return Frames(**read, summary=summary, amdahl=analysis.fit_amdahl(summary))


def _read(
    rows: _Rows, spec: StudySpec, trial: Trial, facts: Mapping[str, Any], key: Mapping[str, Any], directory: Path
) -> None:
    totals = step_totals.read(directory)
    evaluations = read_records(directory, EvaluationRecord)
    target = spec.config(trial.seed).target
    measured = {
        **_speeds(totals),
        **_target_facts(evaluations, target, spec.hold, trial),
        **_metric_facts(evaluations, target),
        **_shares(totals),
        **_staleness_facts(totals),
        "moved_bytes": int(totals.workers["moved_bytes"].sum()),
        "used_by_others": _used_by_others(directory),
        "hold": _hold(evaluations, target, spec.hold),
    }
    measured["ended_by"] = _ended_by(spec, totals, is_reached="reached" in measured)
    rows["trials"].append({**facts, **measured})
    for e in evaluations:
        reached = {"iteration": e.iteration, "time_s": e.time_s, "samples": e.samples}
        reached["moved_bytes"] = totals.bytes_at(e.time_s)
        rows["evaluations"] += [{**key, **reached, "metric": name, "value": value} for name, value in e.metrics.items()]
    rows["workers"] += [{**key, **row} for row in totals.workers.reset_index().to_dict("records")]
    rows["staleness"] += [{**key, "staleness": s, "count": totals.staleness[s]} for s in sorted(totals.staleness)]
    rows["pace"] += [{**key, **row} for row in totals.pace[["time_s", "iteration"]].to_dict("records")]


def _key(spec: StudySpec, trial: Trial, name: str) -> dict[str, Any]:
    return {
        "study": name,
        "script": spec.title,
        "strategy": trial.variant.text,
        "workers": trial.workers,
        "seed": trial.seed,
        "trial": trial.id,
    }


def _facts(spec: StudySpec, trial: Trial, outcome: TrialOutcome, choice: Choice) -> dict[str, Any]:
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "engine": spec.engine,
        "cluster": spec.cluster.name if spec.cluster is not None else "",
        "unit": trial.variant.strategy.traits.unit,
        "servers": trial.variant.strategy.traits.num_servers,
        "target": spec.target or "",
        "passed_targets": " ".join(spec.passed_targets),
        "setting": choice.get((trial.variant.text, trial.workers), ""),
    }


def _speeds(totals: StepTotals) -> dict[str, Any]:
    elapsed_s = totals.time_s
    return {
        "iterations": totals.iterations,
        "training_time_s": elapsed_s,
        "samples": totals.samples,
        "samples_per_s": totals.samples / elapsed_s if elapsed_s > 0 else math.nan,
        "iterations_per_s": totals.iterations / elapsed_s if elapsed_s > 0 else math.nan,
    }


def _target_facts(
    evaluations: list[EvaluationRecord], target: Target | None, hold: int | None, trial: Trial
) -> dict[str, Any]:
    """When the first evaluation reached the target, and what that cost."""
    reaching = first_reaching(evaluations, target, hold) if target is not None else None
    if reaching is None:
        return {}
    reached, num_servers = reaching.evaluation, trial.variant.strategy.traits.num_servers
    return {
        "reached": True,
        "time_to_target_s": reached.time_s,
        "resolution_s": reaching.resolution_s,
        "iterations_to_target": reached.iteration,
        "samples_to_target": reached.samples,
        "worker_s_to_target": trial.workers * reached.time_s,
        "server_s_to_target": num_servers * reached.time_s,
        "cost_s_to_target": (trial.workers + num_servers) * reached.time_s,
    }


def _hold(evaluations: list[EvaluationRecord], target: Target | None, hold: int | None) -> int:
    """How many evaluations in a row count as reaching the target; 0 where nobody knows."""
    if target is None or not evaluations:
        return 0
    return Streak(target, hold).needed(evaluations[-1].metrics)


def _ended_by(spec: StudySpec, totals: StepTotals, *, is_reached: bool) -> str:
    """Why the run ended: a limit that it came up to, or else the script's own end."""
    if is_reached and spec.after_target == "stop":
        return "target"
    if spec.max_steps is not None and totals.iterations >= spec.max_steps:
        return "max-steps"
    return "max-time" if spec.max_time_s is not None and totals.time_s >= spec.max_time_s else "script"


def _metric_facts(evaluations: list[EvaluationRecord], target: Target | None) -> dict[str, Any]:
    """The last and the best value of the target's metric, or else of the first that the script returns."""
    metric = (
        target.metric
        if target is not None
        else next((m for e in evaluations for m in e.metrics if m != NUM_SAMPLES), "")
    )
    values = [e.metrics[metric] for e in evaluations if metric in e.metrics]
    if not values:
        return {"metric": metric, "last_metric": math.nan, "best_metric": math.nan}
    return {"metric": metric, "last_metric": values[-1], "best_metric": _best(values, metric, target)}


def _best(values: list[float], metric: str, target: Target | None) -> float:
    known = [value for value in values if math.isfinite(value)]
    is_rising = target.rising if target is not None else rises(metric)
    return (max if is_rising else min)(known, default=math.nan)


def _shares(totals: StepTotals) -> dict[str, float]:
    sums = {part: float(totals.workers[f"{part}_s"].sum()) for part in ("compute", "communication", "waiting")}
    whole_s, hidden_s = sum(sums.values()), float(totals.workers["hidden_s"].sum())
    shares = {f"{part}_share": part_s / whole_s if whole_s > 0 else math.nan for part, part_s in sums.items()}
    exchange_s = hidden_s + sums["communication"] + sums["waiting"]
    return {**shares, "hidden_share": hidden_s / exchange_s if exchange_s > 0 else 0.0}


def _used_by_others(directory: Path) -> float:
    """NaN where nobody wrote it down."""
    try:
        return float(manifest.read(directory)["load"]["used_by_others"])
    except (UsageError, KeyError, TypeError):
        return math.nan


def _staleness_facts(totals: StepTotals) -> dict[str, Any]:
    num = totals.staleness.total()
    weighted = sum(staleness * count for staleness, count in totals.staleness.items())
    return {"mean_staleness": weighted / num if num else math.nan, "max_staleness": max(totals.staleness, default=0)}
