"""A study: one script under several strategies, numbers of workers and seeds, in a directory of its own."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import final

from rich.console import Console

from paceline import durable
from paceline.engines.standing import Watcher
from paceline.errors import RunFailed, UsageError
from paceline.lab import gathering, runner, verdict
from paceline.lab.frames import FINISHED, Frames
from paceline.lab.progress import StudyProgress
from paceline.lab.runner import OUTCOME_FILE, Position, StudyWatcher, TrialOutcome
from paceline.lab.spec import StudySpec, Trial
from paceline.lab.tracking import Tracking
from paceline.running import watching
from paceline.running.launch import Quiet
from paceline.strategies.base import Strategy

SPEC_FILE = "study.json"
TABLES = "tables"


@final
class _QuietStudy:
    """Shows nothing but what the scripts print."""

    def trial(self, trial: Trial, position: Position) -> AbstractContextManager[Watcher]:
        return nullcontext(Quiet())

    def on_outcome(self, trial: Trial, position: Position, outcome: TrialOutcome, directory: Path) -> None:
        pass


@dataclass(frozen=True)
class Study:
    """A study's directory and what it says.

    >>> study = Study.run("train.py", strategies=["all-reduce", "ps-bsp:servers=2"], workers=[1, 2],
    ...                   target="accuracy=0.9", eval_every=20, out="study")  # doctest: +SKIP
    >>> study.frames.summary  # doctest: +SKIP
    >>> print(study.verdict)  # doctest: +SKIP
    """

    directory: Path
    spec: StudySpec

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @classmethod
    def run(
        cls,
        script: str | Path,
        *,
        strategies: Sequence[str | Strategy],
        workers: Sequence[int],
        out: str | Path,
        seeds: int | Sequence[int] = 3,
        target: str | Sequence[str] | None = None,
        hold: int | None = None,
        after_target: str = "stop",
        tune: Sequence[str] = (),
        attack: str | Sequence[str] = (),
        max_steps: int | None = None,
        max_time_s: float | None = None,
        eval_every: int | str | None = None,
        device: str = "auto",
        deadline_s: float = 300.0,
        start_deadline_s: float = 120.0,
        engine: str = "ray",
        cluster: str | Path | None = None,
        address: str | None = None,
        insecure: bool = False,
        environment: Mapping[str, str] | Sequence[str] = (),
        elastic: str | None = None,
        replace: int | None = None,
        checkpoint_every: int | None = None,
        arguments: Sequence[str] = (),
        retry_failed: bool = False,
        watcher: StudyWatcher | None = None,
    ) -> "Study":
        """Run a study, or go on with the one in `out`: trials that have ended are not run again.

        Of a study in `out` that has more strategies, workers or seeds than are asked for, only those asked for are run;
        what it has besides stays.

        Args:
            script: the training script's path.
            strategies: names, with options as in `ps-bsp:servers=2`, or objects such as `ParameterServer(servers=2)`.
            workers: numbers of workers. A strategy that cannot run with one of them is left out there.
            seeds: how many, or which.
            target: what ends a run; of several the hardest does, and the others' times are shown beside it.
            hold, after_target, attack, max_steps, max_time_s, device, deadline_s: as for `paceline.run`.
            start_deadline_s, address, insecure, arguments: as for `paceline.run`.
            eval_every: as for `paceline.run`, but that a plain number counts batches, so that all strategies and
                numbers of workers are judged equally often for the same work.
            tune: script options with values to try, as `lr=0.01,0.1`: every combination is judged with those that suit
                it best, found by as many runs as any other's on a seed that is not judged.
            engine: `ray`, or `virtual`: on a simulated cluster.
            cluster: of the virtual engine: a TOML file, or the name of one that comes with Paceline.
            environment: variables of workers and servers: values by name, or texts as `NAME=VALUE`, which the study
                keeps and its report shows, or `NAME` for the value here.
            elastic, replace: as for `paceline.run`, of strategies that can go on without some workers.
            checkpoint_every: iterations between checkpoints, from which simulated runs begin anew after a failure.
            retry_failed: run those trials again that failed.
            watcher: is told of trials; none: on a terminal and in a notebook a line of progress, and one for each
                trial that has ended; elsewhere what scripts print alone.

        Raises:
            UsageError: something asked for cannot be had, or `out` holds something else. Nothing was started, unless
                only the first trial could tell.
            RunFailed: there is no cluster to be had. A trial that fails raises nothing: its status says so.
            StudyInterrupted: by Ctrl-C (a KeyboardInterrupt); the same call goes on.
        """
        spec = StudySpec.create(
            script,
            strategies=strategies,
            workers=workers,
            seeds=range(seeds) if isinstance(seeds, int) else seeds,
            arguments=arguments,
            target=target,
            hold=hold,
            after_target=after_target,
            tune=tuple(tune),
            attacks=(attack,) if isinstance(attack, str) else tuple(attack),
            max_steps=max_steps,
            max_time_s=max_time_s,
            eval_every=eval_every,
            device=device,
            deadline_s=deadline_s,
            start_deadline_s=start_deadline_s,
            engine=engine,
            cluster=cluster,
            address=address,
            insecure=insecure,
            environment=environment,
            elastic=elastic,
            replace=replace,
            checkpoint_every=checkpoint_every,
        )
        return cls.conduct(spec, Path(out), watcher=watcher, retry_failed=retry_failed)

    @classmethod
    def conduct(
        cls, spec: StudySpec, out: Path, *, watcher: StudyWatcher | None = None, retry_failed: bool = False
    ) -> "Study":
        """As `run`, for a spec that is made already."""
        try:
            out.mkdir(parents=True, exist_ok=True)
            with runner.locked(out):
                study = cls(out, _taken(out, spec))
                try:
                    watched = watcher or _watcher(spec, study.name)
                    runner.run_trials(spec, out, watched, retry_failed=retry_failed)
                finally:
                    if _has_trials(out):
                        study.save_tables()
        except OSError as error:
            raise UsageError(f"cannot write results to {out}: {error.strerror or error}; give another --out") from None
        return study

    @classmethod
    def conduct_point(
        cls, spec: StudySpec, out: Path, point: int, *, watcher: StudyWatcher | None = None, retry_failed: bool = False
    ) -> "Study":
        """As `conduct`, of one trial alone, by its place from 1, while other processes, on this host or others, run
        others. Raises UsageError if there is no such trial."""
        spec.at(point)
        try:
            out.mkdir(parents=True, exist_ok=True)
            with runner.locked_point(out, point):
                with runner.briefly_locked(out):
                    study = cls(out, _taken(out, spec))
                watched = watcher or _watcher(spec, study.name)
                runner.run_trials(spec, out, watched, retry_failed=retry_failed, point=point)
                if study.has_ended:
                    with runner.briefly_locked(out):
                        study.save_tables()
        except OSError as error:
            raise UsageError(f"cannot write results to {out}: {error.strerror or error}; give another --out") from None
        return study

    @property
    def has_ended(self) -> bool:
        """Whether no trial is left to run."""
        trials = (*self.spec.tuning_trials, *self.spec.trials)
        return len(runner.outcomes(self.directory, trials)) == len(trials)

    @classmethod
    def open(cls, directory: str | Path) -> "Study":
        """The study in a directory, ended or not. Raises UsageError if there is none."""
        path = Path(directory) / SPEC_FILE
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            return cls(Path(directory), StudySpec.from_json(plain["spec"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{directory} holds no study: {error}") from None

    @cached_property
    def frames(self) -> Frames:
        """The tables, from the trials' own records; where only the tables were kept, as they were saved."""
        if not (self.directory / runner.TRIALS).is_dir() and (self.directory / TABLES).is_dir():
            return Frames.load(self.directory / TABLES)
        return gathering.build(self.spec, self.directory, name=self.name)

    @cached_property
    def verdict(self) -> verdict.Verdict:
        """What the tables say, in words."""
        return verdict.judge(self.frames)

    def require_finished(self) -> "Study":
        """This study, for tables of one's own, in whose means a trial without a result would be missing unnoticed.

        Raises:
            RunFailed: a trial has failed or was not run; the message names the first, and says why.
        """
        trials = self.frames.trials
        lacking = trials[trials["status"] != FINISHED]
        if len(lacking):
            first = lacking.iloc[0]
            raise RunFailed(
                f"{self.directory}: {len(lacking)} of {len(trials)} trials have no result; the first is "
                f"{first['strategy']} with {first['workers']} workers and seed {first['seed']}: "
                f"{first['reason'] or 'it has not been run'}"
            )
        return self

    def save_tables(self) -> None:
        """Write the tables as CSV files, if this study's directory can be written to. Raises OSError."""
        if os.access(self.directory, os.W_OK):
            self.frames.save(self.directory / TABLES)


def _watcher(spec: StudySpec, name: str) -> StudyWatcher:
    """Shows progress to whom it would reach; output that goes to a file stays as the scripts write it."""
    console = Console(stderr=True)
    if watching.is_seen(console):
        return StudyProgress(console, spec, name, tracking=Tracking(), timelines=False)
    return _QuietStudy()


def _has_trials(directory: Path) -> bool:
    """Whether a trial has ended: until then, the directory may still become another study's."""
    return any((directory / runner.TRIALS).glob(f"[!.]*/{OUTCOME_FILE}"))


def _taken(directory: Path, spec: StudySpec) -> StudySpec:
    """Make the directory this study's: a new one, or one that holds the same study, a part of it or more.

    Returns:
        All that the study now consists of.
    """
    if (directory / SPEC_FILE).exists():
        earlier = Study.open(directory).spec
        if _has_trials(directory) or (directory / TABLES).is_dir():
            try:
                spec.require_same_study(earlier)
            except UsageError as error:
                raise UsageError(f"{directory} holds another study: {error}; give another --out") from None
            if spec.is_part_of(earlier):
                return earlier
    elif any(not entry.name.startswith(".") for entry in directory.iterdir()):
        raise UsageError(f"{directory} is not empty and holds no study; give another --out")
    content = {"spec": spec.to_json(), "command": spec.command(out=directory), "paceline": version("paceline")}
    with durable.whole(directory / SPEC_FILE) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return spec
