"""`paceline compare`: one script under several strategies and numbers of workers, measured, compared and explained."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli import common_options, crowding, exit_codes, job_hosts, report, tables
from paceline.errors import UsageError
from paceline.lab import runner
from paceline.lab.frames import FAILED
from paceline.lab.progress import StudyProgress
from paceline.lab.runner import StudyInterrupted
from paceline.lab.spec import StudySpec, parse_seeds
from paceline.lab.study import Study
from paceline.lab.tracking import Tracking

_NEXT_S = 20.0
"""After a failure a study starts another Ray within this time."""


def compare(
    context: typer.Context,
    script: common_options.Script,
    strategies: Annotated[
        str, typer.Option(help="Names from `paceline strategies`, with options as in ps-bsp:servers=2.", metavar="A,B")
    ] = "all-reduce,ps-bsp,ps-asp",
    workers: Annotated[str, typer.Option(help="Numbers of workers.", metavar="N,N")] = "1,2",
    target: common_options.Targets = None,
    hold: common_options.Hold = None,
    after_target: common_options.AfterTarget = "stop",
    tune: Annotated[
        list[str] | None,
        typer.Option(
            help="Values of a script's option to try, once for each combination, which is judged with its best; may be "
            "repeated.",
            metavar="OPTION=A,B",
        ),
    ] = None,
    attack: common_options.Attacks = None,
    seeds: Annotated[str, typer.Option(help="How many, as 3, or which, as 0,1,2.", metavar="N")] = "3",
    engine: common_options.Engine = "ray",
    cluster: common_options.SimulatedCluster = None,
    elastic: common_options.Elastic = None,
    replace: common_options.Replace = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Iterations; simulated runs begin anew from there after a failure.")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="End each run after so many iterations.")] = None,
    max_time: Annotated[float | None, typer.Option(help="End each run after so many seconds of training.")] = None,
    eval_every: common_options.EvalEveryAlike = None,
    device: common_options.Device = "auto",
    deadline: common_options.Deadline = 300.0,
    start_deadline: common_options.StartDeadline = 120.0,
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster (default: RAY_ADDRESS; else one is started here).")
    ] = None,
    insecure: common_options.Insecure = False,
    env: common_options.Env = None,
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
    point: Annotated[
        int | None,
        typer.Option(
            help="Run only this one of the runs, from 1, while others are run elsewhere, as in an array job; the last "
            "to end makes the report.",
            show_default="all",
        ),
    ] = None,
    arguments: common_options.Arguments = None,
) -> None:
    """Run SCRIPT under every combination of strategy, workers and seed, and say which gets there first.

    One run after another. Interrupted at any moment, the same command goes on; a run that fails does not stop the
    others, and makes the exit code 1. More strategies, workers or seeds may be added to a study later.

    Example: paceline compare train.py --strategies all-reduce,ps-bsp:servers=2 --workers 1,2,4 --target accuracy=0.9
    """
    if job_hosts.is_lent(Console(stderr=True), engine=engine, address=address, next_s=_NEXT_S):
        return
    spec = spec_of(context.params)
    tracking = Tracking(tensorboard=tensorboard, services=tuple(track or ()))
    out = out or Path("studies") / script.stem
    study = conduct(spec, out, retry_failed=retry_failed, tracking=tracking, timelines=timelines, point=point)
    if point is None:
        finish([study])
        return
    if study.has_ended:
        with runner.briefly_locked(out):  # of two that end at once, each finds all ended
            write_report([study])
    if runner.outcomes(out, [spec.at(point)])[spec.at(point)].status == FAILED:
        raise typer.Exit(exit_codes.FAILED)


def spec_of(given: Mapping[str, Any]) -> StudySpec:
    """The study that the command's options ask for, by their names."""
    return StudySpec.create(
        given["script"],
        strategies=[text for text in given["strategies"].split(",") if text.strip()],
        workers=_counts(given["workers"]),
        seeds=parse_seeds(given["seeds"]),
        arguments=given["arguments"] or (),
        target=given["target"],
        hold=given["hold"],
        after_target=given["after_target"],
        tune=tuple(given["tune"] or ()),
        attacks=tuple(given["attack"] or ()),
        max_steps=given["max_steps"],
        max_time_s=given["max_time"],
        eval_every=given["eval_every"],
        device=given["device"],
        deadline_s=given["deadline"],
        start_deadline_s=given["start_deadline"],
        engine=given["engine"],
        cluster=given["cluster"],
        elastic=given["elastic"],
        replace=given["replace"],
        checkpoint_every=given["checkpoint_every"],
        address=given["address"],
        insecure=given["insecure"],
        environment=tuple(given["env"] or ()),
    )


def conduct(
    spec: StudySpec,
    out: Path,
    *,
    retry_failed: bool = False,
    tracking: Tracking | None = None,
    timelines: bool = False,
    point: int | None = None,
) -> Study:
    """Run a study, or one of its trials, while showing how it goes, then its table and its verdict."""
    console = Console(stderr=True)
    for left_out in spec.left_out:
        console.print(f"left out: {left_out.reason}", markup=False, highlight=False, soft_wrap=True)
    most = max(trial.workers for trial in spec.trials)
    crowding.warn(console, most, engine=spec.engine, address=spec.address)
    _say_where(console, spec, out)
    name = out.resolve().name
    watcher = StudyProgress(console, spec, name, tracking=tracking or Tracking(), timelines=timelines)
    try:
        if point is None:
            study = Study.conduct(spec, out, watcher=watcher, retry_failed=retry_failed)
        else:
            study = Study.conduct_point(spec, out, point, watcher=watcher, retry_failed=retry_failed)
    except StudyInterrupted as interrupt:
        console.print(str(interrupt), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(exit_codes.INTERRUPTED) from None
    _show(study)
    return study


def write_report(studies: Sequence[Study], out: Path | None = None) -> Path:
    """Write the report of these studies and say where it lies."""
    path = report.write([study.directory for study in studies], out)
    Console().print(f"Report: {path}", markup=False, highlight=False, soft_wrap=True)
    return path


def finish(studies: Sequence[Study], out: Path | None = None) -> Path:
    """Write the report as `write_report` does, then have the command exit with 1 if a trial has failed."""
    path = write_report(studies, out)
    if any((study.frames.trials["status"] == FAILED).any() for study in studies):
        raise typer.Exit(exit_codes.FAILED)
    return path


def _say_where(console: Console, spec: StudySpec, out: Path) -> None:
    """A study may go on elsewhere, but not unsaid: its times are then those of several clusters."""
    with suppress(UsageError):
        before = Study.open(out).spec.address
        if before != spec.address:
            places = [address or "a Ray of its own on this machine" for address in (before, spec.address)]
            text = f"this study ran on {places[0]} and goes on with {places[1]}: its times are of both"
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _show(study: Study) -> None:
    console = Console()
    console.print(tables.of_study(study.frames))
    for line in study.verdict.said:
        console.print(line, markup=False, highlight=False)


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"workers {text!r}: give numbers, as 1,2,4") from None
