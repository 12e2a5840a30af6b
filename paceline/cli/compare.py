"""`paceline compare`: one script under several strategies and numbers of workers, measured, compared and explained."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, final

import typer
from rich.console import Console

from paceline import manifest
from paceline.cli import common_options, crowding, exit_codes, report, tables
from paceline.engines.progress import Watcher
from paceline.errors import UsageError
from paceline.lab import timeline, words
from paceline.lab.frames import FAILED, FINISHED
from paceline.lab.outcome import Outcome
from paceline.lab.reaching import first_reaching
from paceline.lab.runner import Position, StudyInterrupted
from paceline.lab.spec import StudySpec, Trial, parse_seeds
from paceline.lab.study import Study
from paceline.lab.tracking import Tracking
from paceline.records import summarise
from paceline.result import Result
from paceline.watching import ProgressLine


def compare(
    script: common_options.Script,
    strategies: Annotated[
        str, typer.Option(help="Names from `paceline strategies`, with options as in ps-bsp:servers=2.", metavar="A,B")
    ] = "all-reduce,ps-bsp,ps-asp",
    workers: Annotated[str, typer.Option(help="Numbers of workers.", metavar="N,N")] = "1,2",
    target: Annotated[
        str | None, typer.Option(help="What to reach; each run ends when an evaluation does.", metavar="METRIC=VALUE")
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many, as 3, or which, as 0,1,2.", metavar="N")] = "3",
    engine: common_options.Engine = "ray",
    cluster: common_options.SimulatedCluster = None,
    max_steps: Annotated[int | None, typer.Option(help="End each run after so many iterations.")] = None,
    max_time: Annotated[float | None, typer.Option(help="End each run after so many seconds of training.")] = None,
    eval_every: common_options.EvalEvery = None,
    device: common_options.Device = "auto",
    deadline: common_options.Deadline = 300.0,
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster (default: RAY_ADDRESS; else one is started here).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The study's directory; an interrupted one is gone on with.", show_default=False)
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run those again that failed.")] = False,
    tensorboard: Annotated[
        Path | None,
        typer.Option(help="Write TensorBoard events, a directory a trial, here under the study's name.", metavar="DIR"),
    ] = None,
    track: common_options.Track = None,
    timelines: Annotated[
        bool, typer.Option("--timeline", help="Write what everybody did when, a file a trial, for ui.perfetto.dev.")
    ] = False,
    arguments: common_options.Arguments = None,
) -> None:
    """Run SCRIPT under every combination of strategy, workers and seed, and say which gets there first.

    One run after another. Interrupted at any moment, the same command goes on; a run that fails does not stop the
    others, and makes the exit code 1. More strategies, workers or seeds may be added to a study later.

    Example: paceline compare train.py --strategies all-reduce,ps-bsp:servers=2 --workers 1,2,4 --target accuracy=0.9
    """
    spec = StudySpec.create(
        script,
        strategies=[text for text in strategies.split(",") if text.strip()],
        workers=_counts(workers),
        seeds=parse_seeds(seeds),
        arguments=arguments or (),
        target=target,
        max_steps=max_steps,
        max_time_s=max_time,
        eval_every=eval_every,
        device=device,
        deadline_s=deadline,
        engine=engine,
        cluster=cluster,
        address=address,
    )
    tracking = Tracking(tensorboard=tensorboard, services=tuple(track or ()))
    out = out or Path("studies") / script.stem
    conduct(spec, out, retry_failed=retry_failed, tracking=tracking, timelines=timelines)


def conduct(
    spec: StudySpec, out: Path, *, retry_failed: bool = False, tracking: Tracking | None = None, timelines: bool = False
) -> None:
    """Run a study while showing how it goes, then its table, its verdict and where its report lies."""
    console = Console(stderr=True)
    for left_out in spec.left_out:
        console.print(f"left out: {left_out.reason}", markup=False, highlight=False, soft_wrap=True)
    most = max(trial.workers for trial in spec.trials)
    crowding.warn(console, most, engine=spec.engine, address=spec.address)
    _say_where(console, spec, out)
    name = out.resolve().name
    watcher = StudyProgress(console, spec, name, tracking=tracking or Tracking(), timelines=timelines)
    try:
        study = Study.conduct(spec, out, watcher=watcher, retry_failed=retry_failed)
    except StudyInterrupted as interrupt:
        console.print(str(interrupt), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(exit_codes.INTERRUPTED) from None
    _show(study, report.write([study.directory]))
    if (study.frames.trials["status"] == FAILED).any():
        raise typer.Exit(exit_codes.FAILED)


def _say_where(console: Console, spec: StudySpec, out: Path) -> None:
    """A study may go on elsewhere, but not unsaid: its times are then those of several clusters."""
    with suppress(UsageError):
        before = Study.open(out).spec.address
        if before != spec.address:
            places = [address or "a Ray of its own on this machine" for address in (before, spec.address)]
            text = f"this study ran on {places[0]} and goes on with {places[1]}: its times are of both"
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _show(study: Study, report_path: Path) -> None:
    console = Console()
    console.print(tables.of_study(study.frames))
    for line in study.verdict.lines:
        console.print(line, markup=False, highlight=False)
    console.print(f"Report: {report_path}", markup=False, highlight=False, soft_wrap=True)


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"workers {text!r}: give numbers, as 1,2,4") from None


@final
class StudyProgress:
    """Shows a line that moves while a trial runs, and one that stays once it has ended."""

    def __init__(self, console: Console, spec: StudySpec, study: str, *, tracking: Tracking, timelines: bool) -> None:
        self._console, self._spec, self._study = console, spec, study
        self._tracking, self._timelines = tracking, timelines

    @contextmanager
    def trial(self, trial: Trial, position: Position) -> Iterator[Watcher]:
        began_s = time.monotonic()

        def outlook() -> str:
            if position.left_s is None:
                return ""
            return f"{words.seconds(max(1.0, position.left_s - (time.monotonic() - began_s)))} left"

        config = self._spec.config(trial.seed)
        settings: dict[str, str | int | float] = {
            "study": self._study,
            "script": self._spec.script,
            "arguments": shlex.join(self._spec.arguments),
            "target": self._spec.target or "none",
            "strategy": trial.variant.label,
            "workers": trial.workers,
            "seed": trial.seed,
            "engine": self._spec.engine,
            "cluster": self._spec.cluster.name if self._spec.cluster is not None else "none",
        }
        with (
            ProgressLine(
                self._console, _label(trial, position), config, engine=self._spec.engine, outlook=outlook
            ) as line,
            self._tracking.follow(line, run=f"{self._study}/{trial.id}", settings=settings) as watcher,
        ):
            yield watcher

    def on_outcome(self, trial: Trial, position: Position, outcome: Outcome, directory: Path) -> None:
        """Say what came of the trial. What goes wrong with that is said, too: it is not worth a study."""
        label = _label(trial, position)
        try:
            has_finished = outcome.status == FINISHED
            said = _achieved(Result(directory), self._spec, trial) if has_finished else f"failed: {outcome.reason}"
            self._say(f"{label}: {said}")
            if self._timelines and (directory / manifest.FILE_NAME).exists():
                timeline.write(directory)
        except Exception as error:
            self._say(f"{label}: {type(error).__name__}: {error}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _label(trial: Trial, position: Position) -> str:
    return f"{position.number}/{position.num_trials} {trial.label}"


def _achieved(result: Result, spec: StudySpec, trial: Trial) -> str:
    metrics = summarise(result.metrics) or "no evaluation"
    target = spec.config(trial.seed).target
    if target is None:
        return metrics
    reaching = first_reaching(result.evaluations, target)
    if reaching is None:
        return f"{metrics}, target not reached"
    return f"{metrics} after {words.duration(reaching.evaluation.time_s, result.engine)}"
