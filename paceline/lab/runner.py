"""Runs a study's trials one after another, so that any of them can be the last and the next start goes on there.

A trial runs in a scratch directory. When it has ended, its outcome is written there, everything is brought to the disk,
and the directory takes its final name by one rename: whatever happens, a trial is done as a whole or not at all.
"""

import contextlib
import json
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol, cast

import filelock
import psutil

from paceline import durable
from paceline.checkpoint_files import drop_all
from paceline.config import DeviceChoice
from paceline.engines.ray.nodes import connected
from paceline.engines.scripting import Script
from paceline.engines.standing import Watcher
from paceline.errors import PacelineError, UsageError
from paceline.lab import tuning
from paceline.lab.frames import FAILED, FINISHED
from paceline.lab.spec import StudySpec, Trial
from paceline.records import EventRecord, read_records, record_path
from paceline.running import checks, launch
from paceline.running.variables import variables

TRIALS = "trials"
OUTCOME_FILE = "trial.json"
_LOCK = ".lock"
_BRIEFLY_S = 60.0
_GONE_S = 5.0
_LEFT_BEHIND_GONE_S = 30.0  # workers whose launcher was killed find out by themselves
_CREATION_S = 1.0  # the operating system tells when a process began to about a hundredth of a second


@dataclass(frozen=True)
class TrialOutcome:
    """A trial's end. A trial without one is still to be run."""

    status: str
    """`finished` or `failed`."""
    reason: str
    """Why it failed; empty if it did not."""
    wall_s: float
    """How long it took with start-up and evaluation, from which the rest of a study is estimated."""

    def __post_init__(self) -> None:
        # Output of a dead process may hold what is no text, which no file and no terminal would take.
        object.__setattr__(self, "reason", self.reason.encode("utf-8", "backslashreplace").decode())

    def write(self, directory: Path) -> None:
        (directory / OUTCOME_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "TrialOutcome | None":
        """The outcome in a trial's final directory, if there is one. Raises UsageError if the file is no outcome."""
        path = directory / OUTCOME_FILE
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path} does not say how the trial ended: {error}; remove {directory}") from None


@dataclass(frozen=True)
class Position:
    """Where a study is when one of its trials begins."""

    number: int
    """This trial's number, from 1."""
    num_trials: int
    left_s: float | None
    """Estimated wall time from here to the study's end; none before the first trial has ended."""


class StudyWatcher(Protocol):
    """Who looks on."""

    def trial(self, trial: Trial, position: Position) -> AbstractContextManager[Watcher]:
        """Entered while the trial runs, and left by what it fails with; what it gives is told of its progress."""
        ...

    def on_outcome(self, trial: Trial, position: Position, outcome: TrialOutcome, directory: Path) -> None:
        """The trial has ended, and its results are in the directory."""
        ...


class StudyInterrupted(KeyboardInterrupt):
    """A study was ended by the user; the message says how to go on."""


def directory_of(study: Path, trial: Trial) -> Path:
    """A trial's final directory."""
    return study / TRIALS / trial.id


def outcomes(study: Path, trials: Sequence[Trial]) -> dict[Trial, TrialOutcome]:
    """The outcomes of the trials that have ended."""
    found = {trial: TrialOutcome.read(directory_of(study, trial)) for trial in trials}
    return {trial: outcome for trial, outcome in found.items() if outcome is not None}


@contextmanager
def locked(study: Path) -> Iterator[None]:
    """Keep others from running the same study. Raises UsageError if another process does, or runs one of its trials."""
    with ExitStack() as stack:
        stack.enter_context(_held(study / _LOCK, wait_s=0.0))  # first: a trial that begins later waits for it
        for lock in sorted(study.glob(f"{_LOCK}-*")):
            stack.enter_context(_held(lock, wait_s=0.0))
        yield


@contextmanager
def locked_point(study: Path, point: int) -> Iterator[None]:
    """Keep others from running this trial. Raises UsageError if another process does."""
    with _held(study / f"{_LOCK}-{point}", wait_s=0.0):
        yield


@contextmanager
def briefly_locked(study: Path) -> Iterator[None]:
    """While processes that run trials of one study read or write what is of all. Raises UsageError if another process
    runs the whole study."""
    with _held(study / _LOCK, wait_s=_BRIEFLY_S):
        yield


@contextmanager
def _held(lock: Path, *, wait_s: float) -> Iterator[None]:
    try:
        with filelock.FileLock(lock, timeout=wait_s):
            yield
    except filelock.Timeout:
        raise UsageError(
            f"another process is running the study in {lock.parent}; wait for it, or give another --out"
        ) from None


def run_trials(
    spec: StudySpec, study: Path, watcher: StudyWatcher, *, retry_failed: bool = False, point: int | None = None
) -> None:
    """Run all trials that have not ended. One Ray serves them all; after a failure the next trial gets a fresh one.
    On the virtual engine they run in this process, and those that it starts for them.

    Args:
        retry_failed: run those again that failed before.
        point: run one alone, by its place from 1, while others are run elsewhere.

    Raises:
        UsageError: the script has changed since the study was made, the cluster is not the one asked for, or the first
            trial shows that what is asked for cannot be had: no trial is kept that every other would be like.
        RunFailed: there is no cluster to be had.
        StudyInterrupted: by Ctrl-C.
        OSError: results cannot be written.
    """
    trials: tuple[Trial, ...] = (*spec.tuning_trials, *spec.trials) if point is None else (spec.at(point),)
    done = outcomes(study, trials)
    if retry_failed:
        done = {trial: outcome for trial, outcome in done.items() if outcome.status != FAILED}
    left = [trial for trial in trials if trial not in done]
    if not left:
        return
    # Read once: a script that is edited meanwhile does not change what the trials still to come are.
    script = spec.read_script()
    try:
        _clear_left_behind(study, "*" if point is None else left[0].id)
        while left:
            with connected(spec.address, insecure=spec.insecure) if spec.engine == "ray" else nullcontext():
                _run_until_failure(spec, script, study, watcher, left, done, is_alone=point is not None)
    except KeyboardInterrupt:
        raise StudyInterrupted(
            f"interrupted; {len(done)} of {len(trials)} trials have ended and are kept in {study}: "
            "the same command with that --out goes on from there"
        ) from None


def _run_until_failure(
    spec: StudySpec,
    script: Script,
    study: Path,
    watcher: StudyWatcher,
    left: list[Trial],
    done: dict[Trial, TrialOutcome],
    *,
    is_alone: bool,
) -> None:
    """Run trials off the front of `left` into `done` until one fails, whose Ray is not to be trusted.

    `is_alone`: other trials are run elsewhere, so that a failure says nothing of them.
    """
    while left:
        trial = left[0]
        position = Position(len(done) + 1, len(done) + len(left), estimate_left_s(left, done))
        is_first = not is_alone and not any(outcome.status == FINISHED for outcome in done.values())
        watched = watcher.trial(trial, position)
        outcome = _run(spec, trial, script, study, watched, is_first=is_first)
        done[left.pop(0)] = outcome
        watcher.on_outcome(trial, position, outcome, directory_of(study, trial))
        if outcome.status == FAILED:
            return


def _run(
    spec: StudySpec,
    trial: Trial,
    script: Script,
    study: Path,
    watched: AbstractContextManager[Watcher],
    *,
    is_first: bool,
) -> TrialOutcome:
    """`is_first`: no trial has finished yet."""
    final = directory_of(study, trial)
    scratch = final.with_name(f".{final.name}.partial")
    for left in (scratch, final):
        shutil.rmtree(left, ignore_errors=True)
    began_s = time.monotonic()
    status, reason = FINISHED, ""
    try:
        with watched as watcher:
            _launch(spec, trial, _for_trial(spec, trial, script, study), scratch, watcher)
        _wait_for_processes(scratch, limit_s=_GONE_S)
    except UsageError as error:
        if is_first:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        status, reason = FAILED, str(error)
    except PacelineError as error:
        status, reason = FAILED, str(error)
    except Exception as error:  # whatever Ray or a full disk raises is this trial's end and not the study's
        status, reason = FAILED, f"{type(error).__name__}: {error}"
    outcome = TrialOutcome(status, reason, time.monotonic() - began_s)
    scratch.mkdir(parents=True, exist_ok=True)
    drop_all(scratch)  # a trial that has ended is never gone on with
    outcome.write(scratch)
    durable.replace(scratch, final)
    return outcome


def _for_trial(spec: StudySpec, trial: Trial, script: Script, study: Path) -> Script:
    """The script with the options that the trial tries, or with those that suited its combination best."""
    setting = trial.setting or tuned(spec, study).get((trial.variant.text, trial.workers), "")
    options = [
        part for option in setting.split() for part in (f"--{option.partition('=')[0]}", option.partition("=")[2])
    ]
    return replace(script, arguments=(*script.arguments, *options))


def tuned(spec: StudySpec, study: Path) -> tuning.Choice:
    """What each combination is judged with, as far as trials that tune have finished."""
    ended = outcomes(study, spec.tuning_trials)
    finished = {trial: directory_of(study, trial) for trial in ended if ended[trial].status == FINISHED}
    return tuning.choose(spec, finished)


def _launch(spec: StudySpec, trial: Trial, script: Script, directory: Path, watcher: Watcher) -> None:
    is_elastic = spec.elastic is not None and trial.variant.strategy.traits.repeats_steps
    launch.run(
        script,
        strategy=trial.variant.strategy,
        workers=trial.workers,
        engine=cast(checks.EngineChoice, spec.engine),
        cluster=spec.cluster.content if spec.cluster is not None else None,
        address=spec.address,
        insecure=spec.insecure,
        environment=variables(spec.environment),
        max_steps=spec.max_steps,
        max_time_s=spec.max_time_s,
        eval_every=spec.eval_every,
        target=spec.config(trial.seed).target,
        hold=spec.hold,
        after_target=spec.config(trial.seed).after_target,
        seed=trial.seed,
        device=cast(DeviceChoice, spec.device),
        deadline_s=spec.deadline_s,
        start_deadline_s=spec.start_deadline_s,
        attack=spec.attacks,
        elastic=spec.elastic if is_elastic else None,
        replace=spec.replace if is_elastic else None,
        checkpoint_every=spec.checkpoint_every,
        out=directory,
        watcher=watcher,
    )


def _clear_left_behind(study: Path, trial: str) -> None:
    """Wait for the workers of a trial whose launcher was killed, beside which nothing can be measured."""
    for scratch in (study / TRIALS).glob(f".{trial}.partial"):
        with contextlib.suppress(UsageError):  # what is half-written names nobody to wait for
            _wait_for_processes(scratch, limit_s=_LEFT_BEHIND_GONE_S)
        shutil.rmtree(scratch, ignore_errors=True)


def _wait_for_processes(directory: Path, *, limit_s: float) -> None:
    """Wait until the trial's own processes are gone, as far as they are on this machine."""
    started = [event for event in read_records(directory, EventRecord) if event.name == "started"]
    pids: Mapping[str, int] = started[-1].details.get("pids", {}) if started else {}
    written_s = record_path(directory, EventRecord).stat().st_mtime if pids else 0.0
    until_s = time.monotonic() + limit_s
    while any(_is_running(pid, since_s=written_s) for pid in pids.values()) and time.monotonic() < until_s:
        time.sleep(0.01)


def _is_running(pid: int, *, since_s: float) -> bool:
    """Whether a process runs that existed at that time; a later one only has its number."""
    try:
        process = psutil.Process(pid)
        began_s = float(process.create_time())
        return began_s <= since_s + _CREATION_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def estimate_left_s(left: Sequence[Trial], done: Mapping[Trial, TrialOutcome]) -> float | None:
    """Wall seconds of the trials in `left`: each as those of its strategy and workers, else as the mean of all."""
    finished = {trial: outcome.wall_s for trial, outcome in done.items() if outcome.status == FINISHED}
    if not finished:
        return None
    mean_s = statistics.fmean(finished.values())

    def expected_s(trial: Trial) -> float:
        alike = [s for t, s in finished.items() if (t.variant, t.workers) == (trial.variant, trial.workers)]
        return statistics.fmean(alike) if alike else mean_s

    return sum(map(expected_s, left))
