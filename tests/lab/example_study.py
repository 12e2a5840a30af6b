"""A study made up by a formula: four strategies, 1 to 10 workers, three seeds, with everything that can go wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.lab.analysis import fit_amdahl, summarise
from paceline.lab.frames import Frames, table

TARGET = 0.4
CLUSTER = "rack & pinion"
HOSTILE = '<script>document.title="owned"</script><img src=x onerror=alert(1)> worker-3 died: exit code -9'
FAILED, NEVER_SEED = "ps-ssp-n5-s1", "ps-asp-n5-s2"
COUNTS = (1, 2, 5, 10)
# Name, synchronous, servers, serial share of a step, samples to target with one worker, their growth with workers.
STRATEGIES = (
    ("all-reduce", True, 0, 0.10, 60_000, 1.04),
    ("ps-bsp:servers=2", True, 2, 0.13, 60_000, 1.04),
    ("ps-ssp", False, 1, 0.08, 62_000, 1.08),
    ("ps-asp", False, 1, 0.05, 62_000, 1.16),
)
_BATCH, _STEP_S, _EVAL_EVERY = 100, 0.16, 10


def frames(
    *, study: str = "example", engine: str = "ray", slowdown: float = 1.0, hostile: bool = True, num_strategies: int = 4
) -> Frames:
    """The study's tables; `slowdown` stretches all times, and only the first strategies are in it."""
    parts: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("trials", "evaluations", "workers", "staleness", "pace")
    }
    for strategy in STRATEGIES[:num_strategies]:
        for count in COUNTS:
            for seed in range(3):
                _trial(parts, strategy, count, seed, study=study, engine=engine, slowdown=slowdown, hostile=hostile)
    trials = table("trials", parts["trials"])
    summary = summarise(trials)
    made = {name: table(name, rows) for name, rows in parts.items() if name != "trials"}
    return Frames(trials=trials, summary=summary, amdahl=fit_amdahl(summary), **made)


def _trial(
    parts: dict[str, list[dict[str, Any]]], strategy: tuple[Any, ...], count: int, seed: int, **settings: Any
) -> None:
    name, synchronous, servers, serial, samples_alone, growth = strategy
    random = np.random.default_rng([seed, count, len(name)])
    trial = f"{name.replace(' ', '_')}-n{count}-s{seed}"
    key = {
        "study": settings["study"],
        "script": "train.py",
        "strategy": name,
        "workers": count,
        "seed": seed,
        "trial": trial,
    }
    never = (name == "ps-asp" and count == 10) or trial == NEVER_SEED
    step_s = _STEP_S * settings["slowdown"] * (1 - serial + serial * count) * random.uniform(0.95, 1.05)
    needed = samples_alone * growth ** (count - 1) * random.uniform(0.93, 1.07)
    per_iteration = _BATCH * count if synchronous else _BATCH
    iterations = math.ceil(needed / per_iteration / _EVAL_EVERY) * _EVAL_EVERY
    iteration_s = step_s if synchronous else step_s / count
    if trial == FAILED:
        reason = HOSTILE if settings["hostile"] else "worker-3 died: exit code -9"
        parts["trials"].append(_trial_row(key, "failed", reason, settings["engine"], synchronous, servers))
        return
    best = 0.37 if never else TARGET
    at = np.arange(_EVAL_EVERY, iterations + 1, _EVAL_EVERY)
    values = 0.1 + (best - 0.1) * (1 - np.exp(-3.2 * at / iterations)) / (1 - math.exp(-3.2))
    values += np.append(random.normal(0, 0.004, len(at) - 1), 0.0) * (at < iterations)
    values = np.minimum(values, best - 0.001 * (at < iterations))
    for iteration, value in zip(at.tolist(), values.tolist(), strict=True):
        row = {"iteration": iteration, "time_s": iteration * iteration_s, "samples": iteration * per_iteration}
        row["moved_bytes"] = 10**8 * count * iteration // iterations
        parts["evaluations"].append({**key, **row, "metric": "accuracy", "value": value})
    whole_s = iterations * iteration_s
    for point in np.linspace(0, iterations, 60).round().astype(int).tolist():
        parts["pace"].append({**key, "time_s": point * iteration_s, "iteration": point})
    compute, waiting = 1 / (1 + serial * count), 0.04 * math.log2(count) if synchronous else 0.01
    communication = 1 - compute - waiting
    for worker in range(count):
        late = 0.03 if worker == count - 1 and synchronous and count > 2 else 0.0
        seconds = {"compute_s": whole_s * (compute + late), "waiting_s": whole_s * max(waiting - late, 0.0)}
        hidden_s = 0.3 * whole_s * communication if name == "all-reduce" and count > 1 else 0.0
        seconds |= {"communication_s": whole_s * communication, "hidden_s": hidden_s}
        parts["workers"].append(
            {**key, "worker": worker, "steps": iterations // count, "moved_bytes": 10**8, **seconds}
        )
    for stale in range(1 if synchronous else 2 * count - 1):
        weight = 1.0 if synchronous else math.exp(-(((stale - count + 1) / max(0.4 * count, 0.5)) ** 2))
        parts["staleness"].append({**key, "staleness": stale, "count": round(iterations * weight)})
    row = _trial_row(key, "finished", "", settings["engine"], synchronous, servers)
    row |= {"ended_by": "max-time" if never else "target"}
    row |= {"iterations": iterations, "training_time_s": whole_s, "samples": iterations * per_iteration}
    row |= {"samples_per_s": per_iteration / iteration_s, "iterations_per_s": 1 / iteration_s}
    row |= {"last_metric": best, "best_metric": best, "moved_bytes": 10**8 * count}
    row |= {"compute_share": compute, "communication_share": communication, "waiting_share": waiting}
    row |= {"mean_staleness": 0.0 if synchronous else count - 1.0, "max_staleness": 0 if synchronous else 2 * count - 2}
    if not never:
        row |= {"reached": True, "time_to_target_s": whole_s, "iterations_to_target": iterations}
        row |= {"samples_to_target": iterations * per_iteration, "worker_s_to_target": count * whole_s}
        row |= {"server_s_to_target": servers * whole_s, "cost_s_to_target": (count + servers) * whole_s}
    parts["trials"].append(row)


def _trial_row(
    key: dict[str, Any], status: str, reason: str, engine: str, synchronous: bool, servers: int
) -> dict[str, Any]:
    absent = dict.fromkeys(("time_to_target_s", "iterations_to_target", "samples_to_target"), math.nan)
    absent |= dict.fromkeys(("worker_s_to_target", "server_s_to_target", "cost_s_to_target"), math.nan)
    absent |= dict.fromkeys(("last_metric", "best_metric"), math.nan)
    zero = dict.fromkeys(("iterations", "training_time_s", "samples", "samples_per_s", "iterations_per_s"), 0)
    zero |= {f"{part}_share": 0.0 for part in ("compute", "communication", "waiting", "hidden")}
    zero |= {"moved_bytes": 0, "mean_staleness": 0.0, "max_staleness": 0}
    facts = {
        "status": status,
        "reason": reason,
        "engine": engine,
        "unit": "update" if synchronous else "gradient",
        "servers": servers,
    }
    facts |= {"setting": "", "passed_targets": "", "ended_by": "", "hold": 1}
    facts["cluster"] = CLUSTER if engine == "virtual" else ""
    return {**key, **absent, **zero, **facts, "target": f"accuracy={TARGET}", "reached": False, "metric": "accuracy"}
