"""`paceline run`: train one script under one strategy."""

import shlex
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from paceline.cli import beginning, common_options, crowding, detaching, exit_codes, job_hosts
from paceline.config import AfterTarget, DeviceChoice, RunConfig, Target, in_order
from paceline.elastic.spec import GlobalBatch
from paceline.engines.scripting import read_script
from paceline.errors import RunFailed, UsageError
from paceline.lab.tracking import Tracking
from paceline.running.variables import variables
from paceline.running.watching import ProgressLine

_NOTHING_TRAINED = (
    "Nothing was trained under Paceline: the script made no step with what worker.prepare returned. It needs "
    "paceline.init() and worker.prepare(model, optimizer, loader); see docs/script.md. Loops of other "
    "frameworks say worker.begin_step(samples); without it steps are not recorded, and --max-steps and --max-time end "
    "nothing. Keras' fit by itself exchanges nothing between workers (docs/other-frameworks.md)."
)
_NOTHING_STEPPED = (
    "No step was recorded: the script made none with an hvd.DistributedOptimizer, which strategy horovod records."
)
_ONE_ROUND = (
    "the run had no second round: each worker took its {} steps alone, and workers compared learning rates and steps "
    "at the end only; let it train longer, or choose shorter rounds (--option every=N)"
)
_ENDED_EARLY = {
    "script": "The script ended by itself after {:,} of {:,} rounds: a pass over its loader is one client's turn, and "
    "it makes no more; let it loop longer, since its loop ends with the run.",
    "privacy": "The run ended after {:,} of {:,} rounds: one more would cost more than its epsilon.",
}
_NOT_RECORDED = "Steps of a script of Horovod's are recorded with --strategy horovod."


def run(
    script: common_options.Script,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="A name from `paceline strategies`, with options as in ps-asp:servers=2.",
            show_default=f"{job_hosts.STRATEGY}; horovod for a script of Horovod's",
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that train.", show_default="1")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="A further option of the strategy; may be repeated.", metavar="KEY=VALUE")
    ] = None,
    engine: common_options.Engine = "ray",
    cluster: common_options.SimulatedCluster = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster (default: RAY_ADDRESS; else one is started here for the run)."),
    ] = None,
    insecure: common_options.Insecure = False,
    env: common_options.Env = None,
    max_steps: Annotated[int | None, typer.Option(help="End after so many iterations.")] = None,
    max_time: Annotated[float | None, typer.Option(help="End after so many seconds of training.")] = None,
    eval_every: common_options.EvalEvery = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            help="Iterations between checkpoints.", show_default="a killed run loses at most 30 s; at the end"
        ),
    ] = None,
    keep_checkpoints: Annotated[int, typer.Option(help="Checkpoints that are kept, the newest among them.")] = 2,
    keep_best: Annotated[
        str | None,
        typer.Option(
            help="Keep the best checkpoint, too, by a metric of the evaluation: accuracy, loss:min.", metavar="METRIC"
        ),
    ] = None,
    copy_checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Copy the newest checkpoints to this address of fsspec's, too: s3://bucket/run-7.", metavar="URL"
        ),
    ] = None,
    target: common_options.Targets = None,
    hold: common_options.Hold = None,
    after_target: common_options.AfterTarget = "stop",
    seed: Annotated[int, typer.Option(help="Of the model, the data order and every random generator.")] = 0,
    device: common_options.Device = "auto",
    deadline: common_options.Deadline = 300.0,
    start_deadline: common_options.StartDeadline = 120.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Compare the workers' parameters after every step, not only now and then.")
    ] = False,
    attack: common_options.Attacks = None,
    elastic: common_options.Elastic = None,
    global_batch: Annotated[
        str | None,
        typer.Option(
            help="Of an elastic run: keep (as many samples an update as at the start) or grow (with the workers).",
            metavar="keep|grow",
            show_default="keep under all-reduce, otherwise grow",
        ),
    ] = None,
    replace: common_options.Replace = None,
    out: Annotated[
        Path | None, typer.Option(help="Result directory, new or empty.", show_default="a new one under runs/")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on with the run of this result directory, or that copied its checkpoints to this URL.",
            metavar="RUN",
        ),
    ] = None,
    resume_from: Annotated[
        str,
        typer.Option("--from", help="Which checkpoint to --resume: newest, best, or an iteration.", metavar="WHICH"),
    ] = "newest",
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Start the run and return: it outlives the terminal; see paceline attach."),
    ] = False,
    tensorboard: Annotated[
        Path | None,
        typer.Option(help="Write TensorBoard events here, under the result directory's name.", metavar="DIR"),
    ] = None,
    track: common_options.Track = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Write what everybody did when, for ui.perfetto.dev.")
    ] = False,
    alias: Annotated[
        bool, typer.Option(help="Stand in for Horovod where SCRIPT imports it and it is not installed.")
    ] = True,
    arguments: common_options.Arguments = None,
) -> None:
    """Train SCRIPT under one strategy: real processes, on this machine or a Ray cluster, or on a simulated one.

    Example: paceline run train.py --strategy ps-async:servers=2 --workers 4 -- --lr 0.1
    """
    if detach and engine != "ray":
        raise UsageError("--detach is for runs on real processes; leave it out, or use --engine ray")
    waiting, killed = detaching.detach() if detach else (None, None)
    if killed is not None:
        out, resume, resume_from = None, str(killed.run), "newest"
    console = Console(stderr=True)
    if job_hosts.is_lent(console, engine=engine, address=address):
        return
    config = RunConfig(max_steps=max_steps)
    targets = in_order(map(Target.parse, target or ()))
    tracking = Tracking(tensorboard=tensorboard, services=tuple(track or ()))
    environment = variables(env or ())
    program = read_script(script, arguments or (), may_alias=alias)
    strategy, workers = job_hosts.asked(console, strategy, workers, default=job_hosts.default_strategy(program))
    for name in program.aliases:
        console.print(f"{name} is not installed: Paceline stands in for it (--no-alias: it does not)", highlight=False)
    crowding.warn(console, workers, engine=engine, address=address)
    with beginning.ray_beside_imports(engine=engine, address=address, insecure=insecure, num_workers=workers):
        from paceline.pieces import parse_options
        from paceline.running import checks, going_on, launch
        from paceline.strategies import build, name_of, settings_of

        options = parse_options(option or [], where="--option")
        chosen = build(strategy, options)
        directory = out or going_on.resumed_directory(resume) or launch.new_directory(chosen, workers=workers)
        settings: dict[str, str | int | float] = {
            "script": str(script),
            "arguments": shlex.join(arguments or ()),
            "target": ", ".join(map(str, targets)) or "none",
            "strategy": name_of(chosen),
            "workers": workers,
            "seed": seed,
            **({"attack": ", ".join(attack)} if attack else {}),
            **{f"option.{key}": value for key, value in settings_of(chosen).items()},
        }
        try:
            with (
                ProgressLine(console, f"{name_of(chosen)} x {workers}", config, engine=engine)
                if waiting is None
                else detaching.Detached(waiting, directory) as line,
                tracking.follow(line, run=directory.resolve().name, settings=settings) as watcher,
            ):
                result = launch.run(
                    program,
                    strategy=chosen,
                    workers=workers,
                    engine=cast(checks.EngineChoice, engine),
                    cluster=cluster,
                    address=address,
                    insecure=insecure,
                    max_steps=max_steps,
                    max_time_s=max_time,
                    eval_every=eval_every,
                    checkpoint_every=checkpoint_every,
                    keep_checkpoints=keep_checkpoints,
                    keep_best=keep_best,
                    copy_checkpoints=copy_checkpoints,
                    target=targets[-1] if targets else None,
                    hold=hold,
                    after_target=cast(AfterTarget, after_target),
                    seed=seed,
                    device=cast(DeviceChoice, device),
                    deadline_s=deadline,
                    start_deadline_s=start_deadline,
                    strict=strict,
                    attack=attack or (),
                    elastic=elastic,
                    global_batch=cast(GlobalBatch | None, global_batch),
                    replace=replace,
                    out=directory,
                    resume=resume,
                    resume_from=resume_from,
                    watcher=watcher,
                    launcher_lost=None if killed is None else killed.lost,
                    environment=environment,
                )
        except KeyboardInterrupt as interrupt:
            console.print(str(interrupt) or "interrupted", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(exit_codes.INTERRUPTED) from None
        except RunFailed:
            if timeline:
                _show_timeline_of_failed(directory, console)
            raise
    from paceline.cli import tables  # here, because pandas takes a while to load

    Console().print(tables.summary(result, targets[:-1], hold=hold))
    if result.iteration == 0 and resume is None:
        said = _NOTHING_STEPPED if chosen.traits.by_script else _NOT_RECORDED if program.aliases else _NOTHING_TRAINED
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    early = next((event for event in result.events if event.name == "ended_early"), None)
    if early is not None and resume is None:
        said = _ENDED_EARLY[early.details["by"]].format(result.iteration, early.details["wanted"])
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    alone = next((event for event in result.events if event.name == "one_round"), None)
    if alone is not None and result.iteration < 2:  # a run that was interrupted may have gone on since
        console.print(_ONE_ROUND.format(alone.details["steps"]), markup=False, highlight=False, soft_wrap=True)
    if timeline:
        Console(soft_wrap=True).print(f"Timeline: {_timeline_of(result.directory)}", markup=False, highlight=False)


def _timeline_of(directory: Path) -> str:
    """Write it; returns where it lies."""
    from paceline.cli.timeline import in_words
    from paceline.lab import trace

    return in_words(*trace.write(directory))


def _show_timeline_of_failed(directory: Path, console: Console) -> None:
    """Whatever becomes of it, the failure is to be heard of."""
    try:
        said = f"Timeline: {_timeline_of(directory)}"
    except UsageError as error:
        said = str(error)
    console.print(said, markup=False, highlight=False, soft_wrap=True)
