"""The command line: what it refuses before anything is started, and what it shows."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from paceline import Result, cli, launch
from paceline.checkpoint import Checkpoint, WorkerState
from paceline.cli import tables, watching
from paceline.config import RunConfig
from paceline.engines.ray.controller import Progress
from paceline.records import EvaluationRecord, EventRecord, RecordWriter, StepRecord

USAGE = 2


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test here may come so far as to start Ray; everything happens in an empty directory."""

    def started(address: str | None) -> None:
        raise AssertionError("Ray was about to be started")

    monkeypatch.setattr(launch, "connected", started)
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
        ("--strategy ps-bsp --option servers=two", "option servers='two' is not a whole number"),
        ("--strategy ps-bsp --option servers=0", "servers must be at least 1, not 0"),
        ("--strategy ps-bsp --option combine=sometimes", "combine must be one of auto, always, never, not 'sometimes'"),
        ("--option nonfinite=ignore", "nonfinite must be one of raise, skip, allow, not 'ignore'"),
        ("--option bucket_mb", "--option 'bucket_mb' is not of the form key=value"),
        ("--option bucket_mb=1 --option bucket_mb=2", "--option bucket_mb is given twice"),
        ("--target accuracy", "target 'accuracy' is not of the form metric=value, such as accuracy=0.95"),
        ("--target accuracy=high", "target 'accuracy=high' is not of the form metric=value, such as accuracy=0.95"),
        ("--target accuracy=inf", "target 'accuracy=inf' can never be reached"),
        ("--workers 0", "workers must be at least 1, not 0"),
        ("--workers -3", "workers must be at least 1, not -3"),
        ("--strategy single --workers 2", "strategy single runs on 1 worker, not 2; use all-reduce or ps-bsp"),
        (
            "--strategy ps-bsp --workers 2 --option backup_workers=2",
            "backup_workers=2 leaves no gradient to wait for with 2 worker(s)",
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


def test_help_names_every_setting(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert paceline(monkeypatch, "run", "--help") == 0
    shown = capsys.readouterr().out
    for name in ("strategy", "workers", "option", "address", "max-steps", "target", "deadline", "out", "resume"):
        assert f"--{name}" in shown
    assert shown.count("[default: ") == 7
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
    assert names == ["single", "all-reduce", "ring", "ps-bsp", "ps-ssp", "ps-asp", "ps-async"]
    assert any(line.split()[:1] == ["staleness"] for line in lines)


@pytest.mark.parametrize("max_steps", [None, 1_000_000])
@pytest.mark.parametrize("width", [80, 200])
def test_progress_line_does_not_wrap(width: int, max_steps: int | None) -> None:
    console = Console(force_terminal=True, width=width, file=io.StringIO())
    line = watching.ProgressLine(console, "all-reduce x 128", RunConfig(max_steps=max_steps))
    busy = Progress(
        iteration=87_654, time_s=12_345.6, samples=10**10, compute_s=1.0, communication_s=98.0, waiting_s=1.0,
        metrics={"accuracy": 0.123456, "validation_loss_of_the_mean": 1234567.0}, phase="training",
    )  # fmt: skip
    with line:
        time.sleep(2 * watching._REFRESH_S)
        line.on_progress(busy)
        lines = console.render_lines(line._bar.get_renderable())
    texts = ["".join(segment.text for segment in segments) for segments in lines]
    assert len(texts) == 1
    assert len(texts[0]) == width
    assert "all-reduce x 128" in texts[0]
    assert "step 87654  810,005 samples/s" in texts[0]
    assert "0:00:00" in texts[0]
    assert "…" not in texts[0]
    assert ("waiting 1%" in texts[0]) == (width == 200)


def test_without_a_terminal_progress_is_plain_lines(monkeypatch) -> None:
    monkeypatch.setattr(watching, "_PLAIN_INTERVAL_S", 0.0)
    stream = io.StringIO()
    with watching.ProgressLine(Console(file=stream), "ps-bsp x 2", RunConfig()) as line:
        line.on_progress(Progress())
        line.on_progress(Progress(iteration=7, time_s=2.0, samples=600, metrics={"loss": 0.5}, phase="training"))
        line.on_output("worker-1", "hello [bold]you[/bold] " + "x" * 200)
        print("(raylet) a notice of Ray's")
    assert stream.getvalue().splitlines() == [
        "ps-bsp x 2: starting",
        "ps-bsp x 2: step 7  300 samples/s  loss 0.5",
        "[worker-1] hello [bold]you[/bold] " + "x" * 200,
    ]


@pytest.mark.parametrize("metric", ["accuracy", "validation_accuracy_top_5"])
def test_comparison_fits_a_terminal_of_80_columns(tmp_path: Path, metric: str) -> None:
    results = []
    for name, workers, time_s in (("all-reduce", 1, 1234.5), ("all-reduce", 16, 100.25)):
        directory = tmp_path / f"{name}-{workers}"
        directory.mkdir()
        manifest = {"strategy": {"name": name}, "num_workers": workers}
        (directory / "manifest.json").write_text(json.dumps(manifest))
        writer = RecordWriter(directory)
        writer.write(
            [
                StepRecord(0, 1, 1, time_s, 10**8, 0.5 * time_s, 0.3 * time_s, 0.2 * time_s, 0, 0, 0.0),
                EvaluationRecord(1, time_s, 10**8, {metric: 0.953}, 0.1),
                EventRecord("target_reached", "run", 1, time_s, {}),
            ]
        )
        writer.close()
        results.append(Result.open(directory))
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(tables.comparison(results, metric=metric, title="A comparison"))
    lines = [line.rstrip() for line in console.export_text().splitlines() if line.strip()]
    assert len(lines) == 5
    assert max(map(len, lines)) <= 80
    for heading in ("strategy", "workers", "to target", "samples/s", "speed-up", "compute", "comm.", "waiting"):
        assert heading in lines[1]
    assert lines[3].split() == ["all-reduce", "1", "95.3%", "1234.50", "s", "81,004", "1.00", "50%", "30%", "20%"]
    assert lines[4].split() == ["all-reduce", "16", "95.3%", "100.25", "s", "997,506", "12.31", "50%", "30%", "20%"]
