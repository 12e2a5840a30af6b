"""Starting a run: from Python with `paceline.run`, and for the command line."""

import gc
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.checkpoint import FILE_NAME as CHECKPOINT_FILE
from paceline.cluster import reading as cluster_file
from paceline.cluster.description import Cluster
from paceline.config import AfterTarget, Best, DeviceChoice, RunConfig, Target
from paceline.elastic import Elastic, GlobalBatch
from paceline.engines import requests, striking
from paceline.engines.ray.interrupts import Interrupted
from paceline.engines.ray.job import Job
from paceline.engines.ray.nodes import chosen_address, connected
from paceline.engines.ray.supervisor import Supervisor
from paceline.engines.scripting import Program, Script, read_script
from paceline.engines.standing import LauncherLost, Watcher
from paceline.engines.virtual.job import VirtualJob
from paceline.errors import UsageError
from paceline.interval import Interval
from paceline.running import checkpoint_copies, going_on, machine_load, manifest, resuming, simulating, watching
from paceline.running.checks import (
    EngineChoice,
    check_engine,
    check_environment,
    check_metric,
    elastic_of,
    require_effect,
    require_possible_attacks,
    require_survivable,
)
from paceline.running.result import Result
from paceline.strategies import build, name_of
from paceline.strategies.base import Strategy
from paceline.training.sharding.dealt import AT_START


class Quiet(Watcher):
    """Watches a run by printing what its scripts print."""

    def on_output(self, who: str, line: str) -> None:
        print(f"[{who}] {line}", flush=True)


def run(
    program: str | Path | Program,
    *,
    strategy: str | Strategy = "all-reduce",
    workers: int = 1,
    options: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    engine: EngineChoice = "ray",
    cluster: str | Path | Cluster | None = None,
    address: str | None = None,
    insecure: bool = False,
    max_steps: int | None = None,
    max_time_s: float | None = None,
    eval_every: int | str | None = None,
    checkpoint_every: int | None = None,
    keep_checkpoints: int = 2,
    keep_best: str | Best | None = None,
    copy_checkpoints: str | None = None,
    target: str | Target | None = None,
    hold: int | None = None,
    after_target: AfterTarget = "stop",
    seed: int = 0,
    device: DeviceChoice = "auto",
    deadline_s: float = 300.0,
    start_deadline_s: float = 120.0,
    strict: bool = False,
    attack: str | Sequence[str] = (),
    out: str | Path | None = None,
    elastic: str | Elastic | None = None,
    global_batch: GlobalBatch | None = None,
    replace: int | None = None,
    resume: str | Path | None = None,
    resume_from: str | int = resuming.NEWEST,
    watcher: Watcher | None = None,
    launcher_lost: LauncherLost | None = None,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Train a script, or a function without arguments, under a strategy.

    Args:
        program: the path of a script, a script that was read already, or a function that calls `paceline.init()`.
        strategy: a name of `paceline strategies`, with options as in `ps-asp:servers=2`, or a strategy such as
            `ParameterServer(servers=2)`.
        workers: how many processes train.
        options: of the strategy, where it is given by name; besides those that stand behind the name.
        arguments: the script's own; one that was read already has them.
        engine: `ray`: real processes; `virtual`: real gradients on a simulated cluster, whose network and clock are
            simulated too.
        cluster: of the virtual engine: a TOML file, the name of one that comes with Paceline, or what either holds.
        address: of a Ray cluster; none: that of RAY_ADDRESS, else one is started here and ended with the run.
        insecure: the cluster may be one that takes work from anybody, without a token.
        deadline_s: how long a wait for a peer may take.
        start_deadline_s: how long workers and servers may take to start.
        max_steps, max_time_s, target: what ends the run before the script does.
        strict: workers compare their parameters after every step, not only now and then; lock-step strategies only.
        attack: what hostile workers do, as `sign-flip:workers=2`; several are made in turn.
        hold: how many evaluations in a row must reach the target; none: up to 3, by the number of samples that the
            evaluation returns as `num_samples`, so that luck alone rarely passes; 1 where it returns none.
        after_target: `continue` trains on once the target is reached.
        eval_every: from one evaluation to the next: iterations (a number), `10000samples` or `200batches` that all
            workers together train on, or `30s` of training.
        checkpoint_every: iterations between checkpoints.
        keep_checkpoints: how many are kept, the newest among them.
        keep_best: a metric of the evaluation, as `accuracy`, `score:max` or `loss:min`, by which the best checkpoint is
            kept besides; every evaluation that finds a better model takes one.
        copy_checkpoints: an address of fsspec's, as `s3://bucket/run-7`, to which the newest checkpoints are copied
            beside training; it is of this run alone.
        out: the result directory, empty or new; none: one under `runs/`.
        elastic: `MIN:MAX`: workers may die, and the others go on while MIN are left; others may join, up to MAX.
        global_batch: of an elastic run: `keep` (an update is of as many samples as at the start) or `grow` (of as many
            as the workers that are there have in a batch each); none: `keep`, and `grow` under local updates.
        replace: of an elastic run: how often a new worker starts in the place of one that has died; none: never.
        resume: the result directory of a run to go on with; its records are continued unless another `out` is given.
            Or an address that a run has copied its checkpoints to; where it is that of `copy_checkpoints`, and has none
            yet, the run begins.
        resume_from: which of its checkpoints: `newest`, `best`, or an iteration. Where the newest is damaged, the one
            before is taken. In the same directory, later checkpoints and records are dropped.
        watcher: is told of progress and shown what scripts print; none: on a terminal and in a notebook a line of
            progress, elsewhere what scripts print alone.
        launcher_lost: why it is resumed, if a guard does so.
        environment: variables of workers and servers, beside what their host's Ray was started with.

    Raises:
        UsageError: something asked for does not exist or cannot be had. Nothing was started, unless only the script
            could tell, as of a target's metric.
        RunFailed: a worker or server died or failed; the message says who, at which step, and why.
        Interrupted: by Ctrl-C (a KeyboardInterrupt); the message says how to go on.
    """
    plan = _strategy(strategy, options)
    if workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}")
    plan.check(num_workers=workers)
    check_engine(engine, cluster=cluster, address=address)
    virtual = cluster_file.load(cluster) if isinstance(cluster, str | Path) else cluster
    check_environment(engine, environment or ())
    survives = elastic_of(
        elastic, global_batch, replace, default="keep" if plan.traits.when_elastic.lock_step else "grow"
    )
    if survives is not None:
        require_survivable(plan, survives, workers=workers)
    config = RunConfig(
        max_steps=max_steps,
        max_time_s=max_time_s,
        eval_every=Interval.parse(eval_every) if eval_every is not None else None,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        keep_best=Best.parse(keep_best) if isinstance(keep_best, str) else keep_best,
        copy_checkpoints=copy_checkpoints,
        target=Target.parse(target) if isinstance(target, str) else target,
        hold=hold,
        after_target=after_target,
        seed=seed,
        device=device,
        deadline_s=deadline_s,
        start_deadline_s=start_deadline_s,
        strict=strict,
        attacks=(attack,) if isinstance(attack, str) else tuple(attack),
        elastic=survives,
    )
    if plan.traits.by_script:
        if virtual is not None:
            raise UsageError("Horovod's scripts run in real processes; use --engine ray")
        require_effect(plan, config, {"--resume": resume is not None})
    require_possible_attacks(plan, config, workers=workers)
    if strict and workers == 1:
        raise UsageError("--strict has no effect with one worker, which has nobody to differ from")
    if strict and not plan.traits.lock_step:
        raise UsageError(f"--strict has no effect under {name_of(plan)}, whose workers' parameters differ by design")
    task = _program(program, arguments)
    check_metric(task, config.target)
    check_metric(task, config.keep_best, what="metric of --keep-best")
    if resume is None and resume_from != resuming.NEWEST:
        raise UsageError("--from has no effect without --resume RUN")
    found, run_before = going_on.found(resume, resume_from, copied_to=copy_checkpoints)
    raw = checkpoint = None
    if found is not None:
        raw, checkpoint = found.raw, found.checkpoint
        resuming.require_fitting(found, num_workers=workers, seed=seed, elastic=survives)
    directory = _directory(out, run_before, plan, workers)
    path = task.path if isinstance(task, Script) else getattr(task, "__qualname__", repr(task))
    given = task.arguments if isinstance(task, Script) else ()
    described = manifest.describe_run(program=path, arguments=given, strategy=plan, num_workers=workers, config=config)
    described["id"] = (checkpoint_copies.id_of(resume) if resume is not None else None) or uuid.uuid4().hex
    described |= {"resumed_from": str(resume) if resume is not None else None, "engine": engine}
    if virtual is not None:
        described["cluster"] = asdict(virtual)
    else:  # a simulated clock does not mind who else computes
        described["load"] = machine_load.describe()
    config = config.in_directory(directory, resumed_from=run_before)
    continued = found if run_before is not None and directory.resolve() == run_before.resolve() else None
    copies = checkpoint_copies.claimed(
        config,
        directory,
        plan,
        described,
        began_at=0 if checkpoint is None else checkpoint.iteration,
        goes_back=resume_from != resuming.NEWEST or (resume is not None and run_before is None),
    )
    watched = nullcontext(watcher) if watcher is not None else _watched(f"{name_of(plan)} x {workers}", config, engine)
    try:
        at_start = None if checkpoint is None else checkpoint.data.get(AT_START, len(checkpoint.workers))
        if virtual is not None:
            job = VirtualJob(task, plan, workers, virtual, config, raw, at_start)
            try:
                with watched as listening, ExitStack() as beside:
                    _warn(listening, found, resume)

                    def begin() -> None:
                        _write_manifest(directory, described)
                        _go_back(directory, continued)
                        beside.enter_context(checkpoint_copies.kept(copies, listening))

                    began_s = 0.0 if checkpoint is None else checkpoint.time_s
                    simulating.simulate(job, directory, listening, begin=begin, began_s=began_s)
            finally:
                gc.collect()  # models lie in reference cycles, which Python keeps: it counts objects, not bytes
            return Result(directory)
        _write_manifest(directory, described)
        with watched as watcher, connected(address, insecure=insecure, num_workers=workers):
            _warn(watcher, found, resume)
            _go_back(directory, continued)
            is_elsewhere = chosen_address(address) is not None or striking.VARIABLE in os.environ
            variables = {**(own_environment() if is_elsewhere else {}), **(environment or {})}
            real = Job(task, plan, workers, config, raw, variables, at_start, launcher_lost)
            with checkpoint_copies.kept(copies, watcher):
                Supervisor(real, directory, watcher).run()
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(directory, has_begun=virtual is not None) from None
    return Result(directory)


def _warn(watcher: Watcher, found: resuming.Found | None, resume: str | Path | None) -> None:
    if found is None and resume is not None:
        watcher.on_output("run", f"{resume} has no checkpoint yet: the run begins")
    for warning in () if found is None else found.warnings:
        watcher.on_output("run", warning)


def _go_back(directory: Path, continued: resuming.Found | None) -> None:
    """The run goes on in its own directory, if there is one to go on with."""
    if continued is None:
        return
    try:
        resuming.drop_later(continued)
    except OSError as error:
        raise _unwritable(directory, error) from None


def _watched(label: str, config: RunConfig, engine: str) -> AbstractContextManager[Watcher]:
    """A line of progress for whom it would reach; output that goes to a file stays as the scripts write it."""
    console = Console(stderr=True)
    if watching.is_seen(console):
        return watching.ProgressLine(console, label, config, engine=engine)
    return nullcontext(Quiet())


def _strategy(strategy: str | Strategy, options: Mapping[str, Any] | None) -> Strategy:
    if isinstance(strategy, str):
        return build(strategy, options)
    if options:
        raise UsageError("options go with a strategy's name; a strategy object has its own")
    return strategy


def _program(program: str | Path | Program, arguments: Sequence[str]) -> Program:
    if isinstance(program, str | Path):
        return read_script(program, arguments)
    if arguments:
        raise UsageError("arguments go with a script's path; for a function, use functools.partial")
    return program


def own_environment() -> dict[str, str]:
    """Where data sets lie, Horovod's variables, and strikes, for workers of a Ray that was started without knowing."""
    named = ("PACELINE_DATA", striking.VARIABLE)
    return {name: value for name, value in os.environ.items() if name in named or name.startswith("HOROVOD_")}


def new_directory(strategy: Strategy, *, workers: int) -> Path:
    """The result directory of a run that was given none; it is not made here."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]  # noqa: TID251 - a name
    return Path("runs") / f"{stamp}-{name_of(strategy)}-{workers}"


def _directory(out: str | Path | None, before: Path | None, strategy: Strategy, workers: int) -> Path:
    """Make the result directory, or take over `before`, the one to go on with."""
    if before is not None and (out is None or Path(out).resolve() == before.resolve()):
        requests.require_alone(before)
        return before
    directory = Path(out) if out is not None else new_directory(strategy, workers=workers)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        occupied = any(directory.iterdir())
    except OSError as error:
        raise _unwritable(directory, error) from None
    if occupied:
        has_checkpoint = (directory / CHECKPOINT_FILE).exists()
        remedy = f", or --resume {directory} to go on with it" if has_checkpoint else ""
        raise UsageError(f"{directory} is not empty; give another --out{remedy}")
    return directory


def _write_manifest(directory: Path, described: dict[str, Any]) -> None:
    try:
        manifest.write(directory, described)
    except OSError as error:
        raise _unwritable(directory, error) from None


def _unwritable(directory: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write results to {directory}: {error.strerror}; give another --out")
