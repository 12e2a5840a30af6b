"""Ray Tune: each of its trials is a run. Nothing else in Paceline imports this."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, final

from ray import tune
from ray.tune.result import RESULT_DUPLICATE

from paceline.checkpoint_files import copy_newest
from paceline.config import DeviceChoice
from paceline.engines.scripting import Program, Script, read_script
from paceline.errors import UsageError
from paceline.running.background import BackgroundRun
from paceline.running.launch import run
from paceline.strategies import build
from paceline.strategies.base import Strategy

STRATEGY, WORKERS, OPTION = "strategy", "workers", "option."
"""Names in Tune's configuration that are the run's; all others are the script's arguments."""


def trainable(
    program: str | Path | Callable[[dict[str, Any]], Any],
    *,
    eval_every: int,
    strategy: str = "all-reduce",
    workers: int = 1,
    arguments: Sequence[str] = (),
    max_steps: int | None = None,
    max_time_s: float | None = None,
    seed: int = 0,
    device: DeviceChoice = "auto",
    cpus: float = 1.0,
    gpus: float = 0.0,
    insecure: bool = False,
    out: str | Path | None = None,
) -> type[tune.Trainable]:
    """What `ray.tune.Tuner` takes: a class each of whose trials trains a script, or a function, under a strategy.

    Of Tune's configuration `strategy`, `workers` and `option.NAME` are the run's; all else the script gets as `--NAME
    VALUE` behind its other arguments, a function as a dict. Each evaluation is reported as it is made, as its metrics,
    `iteration` and `training_time_s`, and saved for Tune to take. A trial that is stopped saves itself and ends.

    Args:
        program: the path of a script with an evaluation (`worker.evaluation`), read now; or a function that calls
            `paceline.init()`.
        eval_every: iterations from one evaluation, and checkpoint, to the next.
        strategy, workers: where Tune's configuration does not say.
        cpus, gpus: what is asked for each worker, and as for CPUs, for each server, in a bundle of its own of the
            trial's placement group. A worker computes with as many threads.
        arguments, max_steps, max_time_s, seed, device, insecure: as of `paceline.run`.
        out: the runs' result directories are made in this one, called after their trials; none: in Ray's own directory,
            which is not kept.

    Raises:
        UsageError: the script cannot be read.
    """
    if cpus <= 0:
        raise UsageError(f"cpus must be above 0, not {cpus}: Tune starts as many trials at once as fit")
    if callable(program) and arguments:
        raise UsageError("arguments go with a script's path; a function gets Tune's configuration")
    read = program if callable(program) else read_script(program, arguments)
    settings = {"max_steps": max_steps, "max_time_s": max_time_s, "seed": seed, "device": device, "insecure": insecure}
    every = {"eval_every": eval_every, "checkpoint_every": eval_every}
    place = Path(out).resolve() if out is not None else None
    plan = _Plan(read, strategy, workers, settings | every, cpus, gpus, place)
    return type("PacelineTrial", (Trial,), {"plan": plan})


@final
@dataclass(frozen=True)
class _Plan:
    """What all trials have in common."""

    program: Script | Callable[[dict[str, Any]], Any]
    strategy: str
    workers: int
    settings: Mapping[str, Any]
    cpus: float
    gpus: float
    out: Path | None

    def run_of(self, config: Mapping[str, Any]) -> tuple[Program, Strategy, int]:
        """What a trial with this configuration runs. Raises UsageError."""
        options = {name.removeprefix(OPTION): value for name, value in config.items() if name.startswith(OPTION)}
        own = {n: v for n, v in config.items() if n not in (STRATEGY, WORKERS) and not n.startswith(OPTION)}
        strategy = build(config.get(STRATEGY, self.strategy), options)
        workers = config.get(WORKERS, self.workers)
        if not isinstance(self.program, Script):
            return partial(self.program, own), strategy, workers
        given = [text for name, value in own.items() for text in (f"--{name}", str(value))]
        return replace(self.program, arguments=(*self.program.arguments, *given)), strategy, workers


class Trial(tune.Trainable):
    """A run as Tune knows it; `trainable` makes the classes that are used."""

    plan: ClassVar[_Plan]

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """A bundle for each worker and each server; what starts and watches them needs none."""
        _, strategy, workers = cls.plan.run_of(config)
        worker, server = {"CPU": cls.plan.cpus, "GPU": cls.plan.gpus}, {"CPU": cls.plan.cpus}
        return tune.PlacementGroupFactory([{}, *[worker] * workers, *[server] * strategy.traits.num_servers])

    def setup(self, config: dict[str, Any]) -> None:
        self._run: BackgroundRun | None = None
        self._resume_from: Path | None = None

    def step(self) -> dict[str, Any]:
        """The run's next evaluation, which is waited for."""
        self._run = self._run or self._begun()
        record = self._run.next_evaluation()
        if record is not None:
            return {**record.metrics, "iteration": record.iteration, "training_time_s": record.time_s}
        if self._iteration == 0:
            raise UsageError("the run has ended without an evaluation; the script needs worker.evaluation(...)")
        return {"done": True, RESULT_DUPLICATE: True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        if self._run is None:
            raise UsageError("a trial that has not trained has nothing to save")
        copy_newest(self._run.checkpoint().parent, Path(checkpoint_dir))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """The next step goes on from there. Tune may take the directory away, so that it is copied."""
        self.cleanup()
        self._resume_from = _new(self._beside(), f"{self.trial_id}-restored")
        self._resume_from.mkdir(parents=True)
        copy_newest(Path(checkpoint), self._resume_from)

    def cleanup(self) -> None:
        if self._run is not None:
            self._run.stop()
            self._run = None

    def _begun(self) -> BackgroundRun:
        program, strategy, workers = self.plan.run_of(self.config)
        begin = partial(run, program, strategy=strategy, workers=workers, resume=self._resume_from)
        directory = _new(self.plan.out or self._beside(), str(self.trial_id))
        return BackgroundRun(partial(begin, **self.plan.settings), directory)

    def _beside(self) -> Path:
        """Not in the trial's own directory: Tune may copy that while the run changes its files."""
        return Path(self.logdir).resolve().parent / "runs"


def _new(parent: Path, name: str) -> Path:
    """A directory that is not there yet: a trial that goes on has several."""
    places = (parent / f"{name}-{number}" for number in count())
    return next(place for place in places if not place.exists())
