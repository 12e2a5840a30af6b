"""Running a study's trials: order, failures, interruptions at any moment, and going on. Nothing here starts Ray."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from rich.console import Console

from paceline import cli
from paceline.cli import compare
from paceline.engines.standing import Watcher
from paceline.errors import RunFailed, UsageError
from paceline.lab import report_page, runner
from paceline.lab.frames import Frames
from paceline.lab.runner import Position, StudyInterrupted, TrialOutcome
from paceline.lab.spec import StudySpec, Trial
from paceline.lab.study import Study
from paceline.records import EventRecord, RecordWriter
from paceline.running import launch
from tests.lab.machine import ORDER, SETTINGS, Machine


def test_every_trial_is_run_once_on_one_connection(machine: Machine, run: Callable[..., Study], tmp_path: Path) -> None:
    study = run()
    assert machine.started == ORDER
    assert machine.num_connections == 1
    assert sorted(path.name for path in (tmp_path / "out" / "trials").iterdir()) == sorted(ORDER)
    assert (study.frames.trials["status"] == "finished").all()
    assert not list((tmp_path / "out").rglob("checkpoint.pt")), "nobody goes on with a trial that has ended"
    assert (tmp_path / "out" / "tables" / "summary.csv").exists()
    again = run()
    assert machine.started == ORDER
    assert machine.num_connections == 1, "nothing is left to do, so no Ray is started"
    pd.testing.assert_frame_equal(again.frames.summary, study.frames.summary)


def test_workers_of_each_trial_have_the_variables_that_are_named(
    machine: Machine, run: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOUR", "blue")
    run(environment=["COLOUR", "SIZE=a=7"])
    assert machine.environments == [{"COLOUR": "blue", "SIZE": "a=7"}] * len(ORDER)


def test_a_failed_trial_keeps_its_reason_and_the_others_go_on(machine: Machine, run: Callable[..., Study]) -> None:
    def fault(name: str) -> None:
        if name == "ps-bsp-n1-s0":
            raise RunFailed("worker 0 (process 7) died during step 3")

    machine.fault = fault
    trials = run().frames.trials.set_index("trial")
    assert machine.started == ORDER
    assert machine.num_connections == 2, "after a failure the next trial gets a Ray of its own"
    assert trials.loc["ps-bsp-n1-s0", "status"] == "failed"
    assert trials.loc["ps-bsp-n1-s0", "reason"] == "worker 0 (process 7) died during step 3"
    assert (trials["status"] == "finished").sum() == len(ORDER) - 1

    run()
    assert machine.started == ORDER, "what failed is not tried again unasked"
    machine.fault = lambda name: None
    again = run(retry_failed=True)
    assert machine.started == [*ORDER, "ps-bsp-n1-s0"]
    assert (again.frames.trials["status"] == "finished").all()


def test_whoever_looks_on_learns_of_a_failure_that_left_no_record(machine: Machine, run: Callable[..., Study]) -> None:
    """As of a trial whose launcher lost its cluster: a tracker is not to show it as finished."""
    ends: list[str] = []

    class Onlooker:
        @contextlib.contextmanager
        def trial(self, trial: Trial, position: Position) -> Iterator[Watcher]:
            try:
                yield launch.Quiet()
                ends.append("finished")
            except RunFailed as error:
                ends.append(str(error))
                raise

        def on_outcome(self, trial: Trial, position: Position, outcome: TrialOutcome, directory: Path) -> None:
            ends.append(outcome.status)

    def fault(name: str) -> None:
        if name == ORDER[1]:
            raise RunFailed("the cluster is gone")

    machine.fault = fault
    run(seeds=1, watcher=Onlooker())
    assert ends == ["finished", "finished", "the cluster is gone", "failed", *["finished"] * 4]


@pytest.mark.parametrize("at", ["all-reduce-n1-s0", "ps-bsp-n2-s0", "ps-bsp-n2-s1"])
def test_an_interrupt_loses_the_trial_under_way_and_no_other(
    machine: Machine, run: Callable[..., Study], tmp_path: Path, at: str
) -> None:
    def fault(name: str) -> None:
        if name == at:
            raise KeyboardInterrupt

    machine.fault = fault
    position = ORDER.index(at)
    with pytest.raises(StudyInterrupted) as interrupted:
        run()
    assert str(interrupted.value) == (
        f"interrupted; {position} of 8 trials have ended and are kept in {tmp_path / 'out'}: "
        "the same command with that --out goes on from there"
    )
    half = Study.open(tmp_path / "out")
    assert (half.frames.trials["status"] == "finished").sum() == position
    machine.fault = lambda name: None
    run()
    assert machine.started == [*ORDER[: position + 1], *ORDER[position:]]


def test_an_end_between_any_two_writes_leaves_whole_trials(
    machine: Machine, run: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill there would leave it (a real one is in tests/distributed); the next start makes the same tables."""

    class Killed(BaseException):
        pass

    moments = 0
    num_survived: int | None = None

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **settings: Any) -> Any:
            nonlocal moments
            moments += 1
            if num_survived is not None and moments > num_survived:
                raise Killed
            return function(*arguments, **settings)

        return wrapped

    monkeypatch.setattr(os, "replace", mortal(os.replace))
    monkeypatch.setattr(TrialOutcome, "write", mortal(TrialOutcome.write))
    monkeypatch.setattr(runner.shutil, "rmtree", mortal(runner.shutil.rmtree))
    monkeypatch.setattr(launch, "run", mortal(machine.run))
    monkeypatch.setattr(Study, "save_tables", mortal(Study.save_tables))
    whole = run(out=tmp_path / "whole").frames
    num_moments, finished = moments, []
    for num in range(0, num_moments, 3):
        moments, num_survived = 0, num
        with contextlib.suppress(Killed):
            run()
        done = sorted((tmp_path / "out").glob("trials/[!.]*/trial.json"))
        assert set(finished) <= set(done), "a finished trial was lost"
        finished = done
    num_survived = None
    machine.started.clear()
    after = run().frames
    assert sorted([*machine.started, *(path.parent.name for path in finished)]) == sorted(ORDER)
    for name in ("trials", "evaluations", "workers", "summary"):
        left, right = getattr(after, name), getattr(whole, name)
        pd.testing.assert_frame_equal(left.drop(columns="study"), right.drop(columns="study"))


def test_a_final_directory_without_an_outcome_is_run_again(
    machine: Machine, run: Callable[..., Study], tmp_path: Path
) -> None:
    run()
    (tmp_path / "out" / "trials" / ORDER[3] / "trial.json").unlink()
    run()
    assert machine.started == [*ORDER, ORDER[3]]


def test_more_may_be_asked_for_later(machine: Machine, run: Callable[..., Study]) -> None:
    run()
    run(strategies=[*SETTINGS["strategies"], "ps-asp"], workers=[1, 2, 4], seeds=3)
    assert len(machine.started) == len(set(machine.started)) == 3 * 3 * 3


def test_a_part_of_a_study_may_be_run(machine: Machine, run: Callable[..., Study], tmp_path: Path) -> None:
    run()
    before = (tmp_path / "out" / "study.json").read_bytes()
    (tmp_path / "out" / "trials" / "ps-bsp-n2-s1" / "trial.json").unlink()
    (tmp_path / "out" / "trials" / "ps-bsp-n2-s0" / "trial.json").unlink()
    part = run(strategies=["ps-bsp"], seeds=[1])
    assert machine.started == [*ORDER, "ps-bsp-n2-s1"]
    assert (tmp_path / "out" / "study.json").read_bytes() == before
    assert part.frames.trials["status"].tolist().count("missing") == 1, "the rest is still a part of the study"
    with pytest.raises(UsageError, match="strategies had all-reduce as well"):
        run(strategies=["ps-bsp"], seeds=[1, 2])  # neither more nor a part


def test_a_script_that_changes_meanwhile_does_not_change_the_study(
    machine: Machine, run: Callable[..., Study], tmp_path: Path
) -> None:
    before = (tmp_path / "train.py").read_text()
    machine.fault = lambda name: (tmp_path / "train.py").write_text("import paceline  # and more\n") and None
    run()
    assert machine.sources == [before] * len(ORDER)
    with pytest.raises(UsageError, match="the script's text has changed"):
        run()


def test_whatever_a_run_raises_is_that_trials_failure(machine: Machine, run: Callable[..., Study]) -> None:
    def fault(name: str) -> None:
        if name == ORDER[0]:
            raise RuntimeError("the raylet is gone")
        if name == ORDER[1]:
            raise OSError(28, "No space left on device")

    machine.fault = fault
    trials = run().frames.trials
    assert machine.started == ORDER
    assert trials["reason"].tolist()[:3] == [
        "RuntimeError: the raylet is gone", "OSError: [Errno 28] No space left on device", ""
    ]  # fmt: skip


def test_what_cannot_be_had_ends_a_study_that_has_not_begun(
    machine: Machine, run: Callable[..., Study], tmp_path: Path
) -> None:
    def fault(name: str) -> None:
        raise UsageError("unknown target metric 'acuracy'; did you mean 'accuracy'?")

    machine.fault = fault
    with pytest.raises(UsageError, match="did you mean 'accuracy'"):
        run(target="acuracy=0.5")
    assert machine.started == ORDER[:1]
    machine.fault = lambda name: None
    assert len(run().frames.trials) == len(ORDER), "what never had a trial is in nobody's way"

    def late(name: str) -> None:
        if name.startswith("ps-asp"):
            raise UsageError("the optimizer has step hooks")

    machine.fault = late
    trials = run(strategies=[*SETTINGS["strategies"], "ps-asp"]).frames.trials
    assert (trials["status"] == "failed").sum() == 4, "of a study under way, it is some trials' failure"


def test_workers_that_a_killed_launcher_left_are_waited_for(
    machine: Machine, run: Callable[..., Study], tmp_path: Path
) -> None:
    """The next trial is not measured beside them; who only has their number is not waited for."""
    run(seeds=1)
    scratch = tmp_path / "out" / "trials" / f".{ORDER[0]}.partial"
    (tmp_path / "out" / "trials" / ORDER[0]).rename(scratch)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as left:
        writer = RecordWriter(scratch)
        writer.write([EventRecord("started", "run", 0, 0.0, {"pids": {"worker-0": left.pid}})])
        writer.close()
        assert runner._is_running(left.pid, since_s=time.time())
        assert not runner._is_running(left.pid, since_s=psutil.Process(left.pid).create_time() - 2)
        machine.fault = lambda name: alive.append(left.poll() is None)
        alive: list[bool] = []
        threading.Timer(1.0, left.communicate).start()  # says no word, at which it ends
        run(seeds=1)
        assert alive == [False]


def test_the_address_of_the_environment_is_the_studys(
    machine: Machine, run: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert run(seeds=1).spec.address == "10.0.0.1:6379"
    assert machine.addresses == ["10.0.0.1:6379"]
    monkeypatch.delenv("RAY_ADDRESS")
    console = Console(file=io.StringIO(), width=200)
    more = StudySpec.create(tmp_path / "train.py", **{**SETTINGS, "seeds": [0, 1]}, address="10.0.0.2:6379")
    compare._say_where(console, more, tmp_path / "out")
    assert "ran on 10.0.0.1:6379 and goes on with 10.0.0.2:6379" in console.file.getvalue()
    Study.conduct(more, tmp_path / "out")
    assert machine.addresses == ["10.0.0.1:6379", "10.0.0.2:6379"]


def test_an_interrupted_study_has_its_tables(machine: Machine, run: Callable[..., Study], tmp_path: Path) -> None:
    def fault(name: str) -> None:
        if name == ORDER[2]:
            raise KeyboardInterrupt

    machine.fault = fault
    with pytest.raises(StudyInterrupted):
        run()
    saved = Frames.load(tmp_path / "out" / "tables").trials
    assert saved["status"].tolist() == ["finished"] * 2 + ["missing"] * 6


def test_a_report_brings_the_tables_up_to_date(machine: Machine, run: Callable[..., Study], tmp_path: Path) -> None:
    whole = run()
    shutil.rmtree(tmp_path / "out" / "tables")
    report_page.write([tmp_path / "out"], tmp_path / "report.html")
    pd.testing.assert_frame_equal(Frames.load(tmp_path / "out" / "tables").summary, whole.frames.summary)


def point(spec: StudySpec, out: Path, number: int) -> Study:
    return Study.conduct_point(spec, out, number, watcher=None)


def spec_in(directory: Path) -> StudySpec:
    (directory / "train.py").write_text("import paceline\n")
    return StudySpec.create(directory / "train.py", **SETTINGS, seeds=[0, 1])


def test_trials_that_are_run_alone_make_the_study_that_is_run_at_once(machine: Machine, tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    before_the_last = [point(spec, tmp_path / "out", number).has_ended for number in range(len(ORDER), 1, -1)]
    assert not any(before_the_last)
    study = point(spec, tmp_path / "out", 1)
    assert study.has_ended
    assert machine.started == ORDER[::-1]
    assert study.frames.trials["status"].tolist() == ["finished"] * len(ORDER)
    point(spec, tmp_path / "out", 3)
    assert machine.started == ORDER[::-1], "what has ended is not run again"
    for wrong in (0, len(ORDER) + 1):
        with pytest.raises(UsageError, match=f"the study has runs 1 to {len(ORDER)}, and no {wrong}"):
            point(spec, tmp_path / "out", wrong)


def test_a_trial_that_is_run_alone_leaves_those_beside_it_alone(machine: Machine, tmp_path: Path) -> None:
    spec, out = spec_in(tmp_path), tmp_path / "out"
    scratch = out / "trials" / f".{ORDER[1]}.partial"

    def beside(name: str) -> None:
        if name == ORDER[0]:
            scratch.mkdir()  # as of a task that has just begun
            point(spec, out, 3)
            with pytest.raises(UsageError, match="another process is running the study"):
                Study.conduct(spec, out)
            with pytest.raises(UsageError, match="another process is running the study"):
                point(spec, out, 1)

    machine.fault = beside
    point(spec, out, 1)
    assert scratch.is_dir()
    assert machine.started == [*ORDER[:1], ORDER[2]]


def test_what_cannot_be_had_is_the_failure_of_a_trial_that_is_run_alone(machine: Machine, tmp_path: Path) -> None:
    spec = spec_in(tmp_path)

    def refuse(name: str) -> None:
        raise UsageError("not under this strategy")

    machine.fault = refuse
    study = point(spec, tmp_path / "out", 2)
    assert study.frames.trials["status"].tolist().count("failed") == 1


def test_a_trial_that_begins_while_the_study_is_being_locked_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = runner._held

    @contextlib.contextmanager
    def late(lock: Path, *, wait_s: float) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if lock.name == ".lock":
                stack.enter_context(runner.locked_point(tmp_path, 1))
            with held(lock, wait_s=wait_s):
                yield

    monkeypatch.setattr(runner, "_held", late)
    with pytest.raises(UsageError, match="another process is running the study"), runner.locked(tmp_path):
        pass


def test_the_last_of_an_array_writes_the_report_while_no_other_does_and_exits_as_its_own_trial_did(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec_in(tmp_path)
    out, written = tmp_path / "out", []

    def fail(name: str) -> None:
        raise RunFailed("no host")

    def write(directories: list[Path], path: Path | None) -> Path:
        with pytest.raises(UsageError, match="another process"), runner.briefly_locked(out):
            pass
        written.append(directories)
        return out / "report.html"

    def status(number: int) -> int:
        study = ["--strategies", "all-reduce", "--workers", "1,2", "--seeds", "1", "--out", str(out)]
        words = ["paceline", "compare", str(tmp_path / "train.py"), *study, "--point", str(number)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    monkeypatch.setattr(compare.report, "write", write)
    monkeypatch.setattr(runner, "_BRIEFLY_S", 0.05)
    machine.fault = fail
    assert (status(2), written) == (1, [])
    machine.fault = lambda name: None
    assert (status(1), written) == (0, [[out]])
