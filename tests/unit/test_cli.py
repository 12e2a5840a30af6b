"""The command line: what it refuses before anything is started, and what it shows."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from paceline import cli, demo_script
from paceline.checkpoint import Checkpoint, WorkerState
from paceline.cli import demo, exit_codes, report
from paceline.cluster import reading as cluster_file
from paceline.errors import RunFailed
from paceline.lab import runner
from paceline.lab.runner import StudyInterrupted
from paceline.lab.spec import StudySpec
from paceline.lab.study import Study
from paceline.running import launch
from tests.lab.made import reaching, write_trial

USAGE = 2


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test here may come so far as to start Ray; everything happens in an empty directory."""

    def started(address: str | None, *, num_workers: int = 0) -> None:
        raise AssertionError("Ray was about to be started")

    monkeypatch.setattr(launch, "connected", started)
    monkeypatch.setattr(runner, "connected", started)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import paceline\n")


def paceline(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The error of a command that is refused."""

    def refused(*arguments: object) -> str:
        assert paceline(monkeypatch, *arguments) == USAGE
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        return captured.err

    return refused


def save_checkpoint(directory: Path, *, workers: int = 2, seed: int = 0) -> Path:
    state = WorkerState(3, 12, 0, 3, {})
    checkpoint = Checkpoint(3, 1.0, {"w": torch.zeros(4096)}, {}, [], [state] * workers, seed)
    directory.mkdir()
    (directory / "checkpoint.pt").write_bytes(checkpoint.encode())
    return directory


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--strategy all-reduc", "unknown strategy 'all-reduc'; did you mean 'all-reduce'?"),
        ("--strategy ps-bsp --option server=2", "unknown option for ps-bsp 'server'; did you mean 'servers'?"),
        ("--strategy single --option servers=2", "unknown option for single 'servers'; known are nonfinite"),
        (
            "--strategy all-reduce:codec=top-k:ratio=0.1",
            "unknown option for all-reduce 'ratio'; did you mean 'codec.ratio'?",
        ),
        ("--strategy single:ratio=0.1", "unknown option for single 'ratio'; known are nonfinite"),
        ("--strategy ps-bsp --option servers=two", "option servers='two' is not a whole number"),
        ("--strategy ps-bsp --option servers=0", "servers must be at least 1, not 0"),
        ("--strategy ps-bsp --option combine=sometimes", "combine must be one of auto, always, never, not 'sometimes'"),
        ("--option nonfinite=ignore", "nonfinite must be one of raise, skip, allow, not 'ignore'"),
        ("--option bucket_mb", "--option 'bucket_mb' is not of the form option=value"),
        ("--option bucket_mb=1 --option bucket_mb=2", "--option bucket_mb is given twice"),
        ("--target accuracy", "target 'accuracy' is not of the form metric=value, such as accuracy=0.95"),
        ("--target accuracy=high", "target 'accuracy=high' is not of the form metric=value, such as accuracy=0.95"),
        ("--target accuracy=inf", "target 'accuracy=inf' can never be reached"),
        ("--env NOWHERE_SET", "--env NOWHERE_SET: it is not set here; give its value, as in --env NOWHERE_SET=VALUE"),
        ("--env =1", "--env '=1' is not as in NAME=VALUE"),
        (
            "--env A=1 --engine virtual --cluster lab-1gbe",
            "--env is for processes that are started; a simulated run has this one's variables",
        ),
        ("--workers 0", "workers must be at least 1, not 0"),
        ("--workers -3", "workers must be at least 1, not -3"),
        ("--strategy single --workers 2", "strategy single runs on 1 worker, not 2; use all-reduce or ps-bsp"),
        (
            "--strategy ps-bsp --workers 2 --option backup_workers=2",
            "backup_workers=2 leaves no gradient to wait for with 2 worker(s)",
        ),
        (
            "--strategy ps-bsp --option replicas=1",
            "replicas=1 needs as many servers besides the first, and servers=1",
        ),
        (
            "--strategy ps-bsp --option servers=2 --option replicas=1 --option backup_workers=1",
            "replicas=1 does not go with backup_workers so far; leave one of them out",
        ),
        (
            "--strategy horovod --max-time 9",
            "--max-time has no effect under strategy horovod, whose script exchanges, evaluates and saves by itself; "
            "--max-steps ends it",
        ),
        ("--max-steps 0", "max-steps must be positive, not 0"),
        ("--deadline -1", "deadline must be positive, not -1.0"),
        ("--device gpu", "device must be auto, cpu or cuda, not 'gpu'"),
        ("--seed -1", "seed must be in 0..2^63-1, not -1"),
    ],
)
def test_refused_settings(refusal, tmp_path: Path, arguments: str, said: str) -> None:
    assert refusal("run", "train.py", *arguments.split()) == f"error: {said}\n"
    assert not (tmp_path / "runs").exists(), "a refused run leaves no directory"


def test_missing_script_names_the_near_miss(refusal) -> None:
    assert refusal("run", "trian.py") == (
        "error: cannot read the script trian.py: No such file or directory; did you mean 'train.py'?\n"
    )


def test_syntax_error_in_the_script(refusal, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import paceline\nfor x in\n")
    error = refusal("run", "train.py")
    assert error.startswith("error: the script train.py is not valid Python: ")
    assert "line 2" in error


def test_directory_that_is_not_empty(refusal, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    assert refusal("run", "train.py", "--out", "out") == "error: out is not empty; give another --out\n"


def test_directory_of_another_run(refusal, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "out")
    assert refusal("run", "train.py", "--out", "out") == (
        "error: out is not empty; give another --out, or --resume out to go on with it\n"
    )


def test_directory_that_cannot_be_made(refusal) -> None:
    assert refusal("run", "train.py", "--out", "train.py/out") == (
        "error: cannot write results to train.py/out: Not a directory; give another --out\n"
    )


def test_directory_that_cannot_be_written(refusal) -> None:
    assert refusal("run", "train.py", "--out", "/proc/self/task").startswith("error: ")
    assert refusal("run", "train.py", "--out", "/proc/out").startswith("error: cannot write results to /proc/out: ")


def test_resume_without_a_checkpoint(refusal, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    assert refusal("run", "train.py", "--resume", "old") == (
        "error: cannot resume from old/checkpoint.pt: No such file or directory; "
        "give the result directory of a run that saved a checkpoint\n"
    )


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_resume_from_a_damaged_checkpoint(refusal, tmp_path: Path, damage: str) -> None:
    path = save_checkpoint(tmp_path / "old") / "checkpoint.pt"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes({"cut": bytes(raw[: len(raw) // 2]), "flipped": bytes(raw), "empty": b""}[damage])
    error = refusal("run", "train.py", "--workers", 2, "--resume", "old")
    assert error.startswith("error: old/checkpoint.pt is no checkpoint, or a damaged one: ")


def test_resume_with_other_workers_or_another_seed(refusal, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "old", workers=2, seed=5)
    assert refusal("run", "train.py", "--workers", 3, "--seed", 5, "--resume", "old") == (
        "error: old/checkpoint.pt was saved with --workers 2; resume with as many\n"
    )
    assert refusal("run", "train.py", "--workers", 2, "--resume", "old") == (
        "error: old/checkpoint.pt was saved with --seed 5; resume with the same\n"
    )


def test_unknown_command_and_unknown_setting(monkeypatch, capsys) -> None:
    assert paceline(monkeypatch, "rnu") == USAGE
    assert paceline(monkeypatch, "run", "train.py", "--worker", 2) == USAGE
    assert "--workers" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "compare", "plan", "probe"])
def test_an_option_of_the_script_before_the_dashes(command: str, monkeypatch, capsys) -> None:
    assert paceline(monkeypatch, command, "train.py", "--lr", "0.1") == USAGE
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "No such option: --lr. The script's own options go after --, as in: -- --lr" in said


def test_an_unknown_option_of_a_command_without_a_script(monkeypatch, capsys) -> None:
    assert paceline(monkeypatch, "report", "study", "--lr", "0.1") == USAGE
    said = capsys.readouterr().err
    assert "No such option: --lr" in said
    assert "script" not in said


def test_help_names_every_setting(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert paceline(monkeypatch, "run", "--help") == 0
    shown = capsys.readouterr().out
    for name in ("strategy", "workers", "option", "address", "max-steps", "target", "deadline", "out", "resume"):
        assert f"--{name}" in shown
    assert shown.count("[default: ") == 16
    assert "paceline run train.py --strategy ps-async" in " ".join(shown.split())


def test_version(monkeypatch, capsys) -> None:
    assert paceline(monkeypatch, "--version") == 0
    assert re.fullmatch(r"paceline \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_no_command_shows_help(monkeypatch, capsys) -> None:
    assert paceline(monkeypatch) in (0, USAGE)
    captured = capsys.readouterr()
    assert "doctor" in captured.out + captured.err


def test_strategies_lists_every_strategy_with_its_options(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert paceline(monkeypatch, "strategies") == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    servers = ["ps-bsp", "ps-sync", "central-storage", "ps-ssp", "ps-asp", "ps-async"]
    gossip = ["gossip", "d-psgd", "sgp", "relay", "noloco", "ad-psgd"]
    local = ["local-sgd", "post-local", "slowmo", "des-loc", "diloco", "async-diloco"]
    averaging = ["fed-avg", "dp-fed-avg", "fed-prox", "fed-avgm", "fed-adam", "fed-yogi", "fed-adagrad"]
    federated = [*averaging, "scaffold", "fed-nova", "fed-bn", "fed-rep", "fed-buff"]
    assert names == ["single", "all-reduce", "ring", *servers, *gossip, *local, *federated, "horovod"]
    assert [line.split()[:1] for line in lines].count(["backup_workers"]) == 1, (
        "another name's options are not repeated"
    )
    assert any(line.split()[:1] == ["staleness"] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--strategies all-reduc", "unknown strategy 'all-reduc'; did you mean 'all-reduce'?"),
        ("--strategies ps-bsp:servers=0", "servers must be at least 1, not 0"),
        ("--strategies single --workers 2", "strategy single runs on 1 worker, not 2; use all-reduce or ps-bsp"),
        ("--strategies ,", "strategies: give at least one"),
        ("--strategies ps-asp,ps-async", "strategies: ps-asp is given twice"),
        ("--strategies ps-sync,ps-bsp", "strategies: ps-bsp is given twice"),
        ("--workers one", "workers 'one': give numbers, as 1,2,4"),
        ("--workers 1,1", "workers: 1 is given twice"),
        ("--seeds few", "seeds 'few': give how many, as 3, or which, as 0,1,2"),
        ("--seeds 0", "seeds: give at least one"),
        ("--target accuracy", "target 'accuracy' is not of the form metric=value, such as accuracy=0.95"),
        (
            "--engine virtual",
            f"--engine virtual needs --cluster: a TOML file, or one of {', '.join(cluster_file.shipped())}",
        ),
        (
            "--cluster lab-1gbe",
            "a cluster's file has no effect on real machines; add --engine virtual to simulate them",
        ),
        ("--max-steps 0", "max-steps must be positive, not 0"),
    ],
)
def test_refused_studies(refusal, tmp_path: Path, arguments: str, said: str) -> None:
    assert refusal("compare", "train.py", *arguments.split()) == f"error: {said}\n"
    assert not (tmp_path / "studies").exists(), "a refused study leaves no directory"


def test_help_of_compare(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert paceline(monkeypatch, "compare", "--help") == 0
    shown = capsys.readouterr().out
    for name in (
        "strategies",
        "workers",
        "target",
        "seeds",
        "engine",
        "max-steps",
        "eval-every",
        "out",
        "retry-failed",
    ):
        assert f"--{name}" in shown


@pytest.mark.parametrize(("failure", "status"), [(None, 0), ("worker 1 died", 1)])
def test_a_trial_that_failed_shows_in_the_exit_code(
    failure: str | None, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    def run_trials(spec: StudySpec, out: Path, watcher: object, *, retry_failed: bool) -> None:
        for seed, trial in enumerate(spec.trials):
            write_trial(runner.directory_of(out, trial), reaching(1.0, failure=failure if seed else None), workers=1)

    monkeypatch.setattr(runner, "run_trials", run_trials)
    monkeypatch.setattr(report, "write", lambda directories, *_: directories[0] / "report.html")
    assert (
        paceline(monkeypatch, "compare", "train.py", "--workers", 1, "--strategies", "single", "--seeds", 2) == status
    )
    assert "Report: studies/train/report.html" in capsys.readouterr().out


def test_a_run_that_fails_has_a_timeline_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    def fail(*_: object, out: Path, **__: object) -> None:
        out.mkdir(parents=True)
        (out / "manifest.json").write_text('{"strategy": {"name": "all-reduce"}}')
        raise RunFailed("worker 1 died")

    monkeypatch.setattr(launch, "run", fail)
    assert paceline(monkeypatch, "run", "train.py", "--timeline") == 1
    (path,) = tmp_path.glob("runs/*-all-reduce-1/timeline.json.gz")
    assert capsys.readouterr().err.splitlines() == [f"Timeline: {path.relative_to(tmp_path)}", "failed: worker 1 died"]


@pytest.mark.parametrize("options", [(), ("--out", "here")])
def test_the_demo_says_where_its_files_are_kept(options: tuple[str, ...], monkeypatch, capsys) -> None:
    kept: list[tuple[StudySpec, Path]] = []
    reports: list[Path] = []
    monkeypatch.setattr(demo, "conduct", lambda spec, out: kept.append((spec, out)))
    monkeypatch.setattr(demo, "finish", lambda studies, out: reports.append(out))
    assert paceline(monkeypatch, "demo", *options) == 0
    directory = Path("here") if options else reports[0].parent
    assert directory.parent == Path() if options else directory.parent == Path("runs")
    assert reports == [directory / "report.html"]
    assert [(spec.engine, max(spec.workers), out) for spec, out in kept] == [
        ("ray", 2, directory / "this-machine"),
        ("virtual", 8, directory / "simulated-lab"),
    ]
    assert kept[0][0].script_sha256 == kept[1][0].script_sha256
    assert kept[0][0].arguments == kept[1][0].arguments
    said = f"Files are kept in {directory}; --out DIR keeps them elsewhere."
    assert (said in capsys.readouterr().err) == (not options)


@pytest.mark.parametrize(("answer", "opened"), [("y\n", 1), ("\n", 1), ("n\n", 0), (None, 0)])
def test_whoever_sits_at_a_terminal_is_offered_the_report(answer: str | None, opened: int, monkeypatch) -> None:
    pages: list[str] = []

    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return answer is not None

    monkeypatch.setattr(demo.webbrowser, "open", pages.append)
    monkeypatch.setattr(sys, "stdin", Keyboard(answer or ""))
    monkeypatch.setattr(sys, "stdout", Keyboard())
    demo._offer(Path("report.html"))
    assert len(pages) == opened


def test_far_more_workers_than_cores_are_warned_of(monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def nothing(*_: object, **__: object) -> None:
        raise RunFailed("not run here")

    monkeypatch.setattr(launch, "run", nothing)
    monkeypatch.setattr(Study, "conduct", nothing)

    def said(*arguments: object) -> str:
        paceline(monkeypatch, *arguments)
        return capsys.readouterr().err

    warning = "workers on 2 cores take turns"
    assert f"9 {warning}" in said("run", "train.py", "--workers", 9)
    assert said("compare", "train.py", "--workers", "1,100,8").count(f"100 {warning}") == 1
    assert warning not in said("run", "train.py", "--workers", 8)
    assert warning not in said("run", "train.py", "--workers", 9, "--address", "10.0.0.1:6379")
    assert warning not in said("run", "train.py", "--workers", 9, "--engine", "virtual", "--cluster", "lab-1gbe")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert warning not in said("run", "train.py", "--workers", 9)


def test_an_interrupted_study_says_how_to_go_on(monkeypatch, capsys) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise StudyInterrupted("interrupted; the same command goes on from there")

    monkeypatch.setattr(runner, "run_trials", interrupted)
    assert paceline(monkeypatch, "compare", "train.py") == exit_codes.INTERRUPTED
    assert capsys.readouterr().err.endswith("interrupted; the same command goes on from there\n")


def test_a_script_that_trains_nothing_is_told_what_it_lacks(monkeypatch, capsys) -> None:
    simulated = ("--engine", "virtual", "--cluster", "lab-1gbe")
    assert paceline(monkeypatch, "run", "train.py", *simulated) == 0
    said = capsys.readouterr().err
    assert "Nothing was trained under Paceline: the script made no step" in said
    assert "Keras' fit by itself exchanges nothing between workers" in said


def test_a_target_that_was_not_reached_is_said(monkeypatch, capsys) -> None:
    script = Path(demo_script.__file__)
    limits = ("--max-steps", 2, "--eval-every", 2, "--target", "accuracy=0.999")
    assert paceline(monkeypatch, "run", script, "--engine", "virtual", "--cluster", "lab-1gbe", *limits) == 0
    said = capsys.readouterr()
    assert "never: wanted accuracy>=0.999" in said.out
    assert "Nothing was trained" not in said.err


def test_chaos_refuses_deaths_to_count_beside_a_schedule(refusal) -> None:
    assert "--kills has no effect with --schedule" in refusal("chaos", "train.py", "--kills", 3, "--schedule", "s.json")
