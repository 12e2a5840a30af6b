"""Studies made by hand: records as a run would have left them, from a few numbers a trial."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.lab.frames import FAILED, FINISHED
from paceline.lab.runner import TrialOutcome, directory_of
from paceline.lab.spec import StudySpec
from paceline.lab.study import Study
from paceline.lab.variant import Variant
from paceline.records import EvaluationRecord, EventRecord, RecordWriter, StepRecord

Combination = tuple[str, int, int]
"""Strategy as on the command line, workers, seed."""


@dataclass(frozen=True)
class Made:
    """A trial: every worker takes `num_steps` steps of equal length until `time_s`, and each evaluation is a tuple of
    iteration, time_s, samples and accuracy."""

    evaluations: Sequence[tuple[int, float, int, float]]
    time_s: float = 10.0
    num_steps: int = 10
    samples_per_step: int = 32
    shares: tuple[float, float, float] = (1.0, 0.0, 0.0)
    """Of compute, communication and waiting."""
    staleness: int = 0
    failure: str | None = None
    used_by_others: float | None = None
    """What the manifest says of the machine; none: there is no manifest."""


def reaching(time_s: float, *, samples: int = 1000, value: float = 0.5, **more: Any) -> Made:
    """A trial that reaches `value` at its end, in ten iterations, with an evaluation shortly before."""
    before = (9, 0.99 * time_s, samples * 9 // 10, 0.1)
    return Made([(0, 0.0, 0, 0.1), before, (10, time_s, samples, value)], time_s=time_s, **more)


def spec(**settings: Any) -> StudySpec:
    strategies = settings.pop("strategies", ("all-reduce",))
    given = {"workers": (1, 2), "seeds": (0,), "target": "accuracy=0.5", **settings}
    return StudySpec(
        script="/somewhere/train.py",
        script_sha256="0" * 64,
        arguments=(),
        strategies=tuple(Variant.parse(text) for text in strategies),
        **given,
    )


def study(directory: Path, trials: Mapping[Combination, Made], **settings: Any) -> Study:
    """A study with these trials; what its spec has besides has not been run."""
    chosen = spec(
        strategies=tuple(dict.fromkeys(strategy for strategy, _, _ in trials)),
        **{
            "workers": tuple(dict.fromkeys(workers for _, workers, _ in trials)),
            "seeds": tuple(dict.fromkeys(seed for _, _, seed in trials)),
            **settings,
        },
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "study.json").write_text(json.dumps({"spec": chosen.to_json()}))
    for trial in chosen.trials:
        made = trials.get((trial.variant.text, trial.workers, trial.seed))
        if made is not None:
            write_trial(directory_of(directory, trial), made, workers=trial.workers)
    return Study.open(directory)


def write_trial(directory: Path, made: Made, *, workers: int) -> None:
    directory.mkdir(parents=True)
    writer = RecordWriter(directory)
    writer.write([EventRecord("training", "run", 0, 0.0, {})])
    step_s = made.time_s / made.num_steps
    parts = [share * step_s for share in made.shares]
    for step in range(1, made.num_steps + 1):
        for worker in range(workers):
            record = StepRecord(
                worker, step, step, step * step_s, made.samples_per_step, *parts, 1000, made.staleness, 0.0
            )
            writer.write([record])
    writer.write([EvaluationRecord(i, t, n, {"accuracy": value}, 5.0) for i, t, n, value in made.evaluations])
    writer.close()
    if made.used_by_others is not None:
        (directory / "manifest.json").write_text(json.dumps({"load": {"used_by_others": made.used_by_others}}))
    status = FAILED if made.failure is not None else FINISHED
    TrialOutcome(status, made.failure or "", made.time_s + 3.0).write(directory)
