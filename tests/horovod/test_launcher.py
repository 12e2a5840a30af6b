"""The command line of Horovod's launcher: what reaches the run, and what is refused before anything starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.cli import run as run_command
from paceline.horovod.settings import Settings

USAGE = 2


def launch(monkeypatch: pytest.MonkeyPatch, text: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", "horovodrun", *text.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("python train.py", "say with -np how many processes there are to be"),
        ("-np 2 ls", "give python SCRIPT and its arguments after the options, not 'ls'"),
        ("-np 2 -H far.example:2 python train.py", "-H and --hostfile name far.example, and hosts are reached through"),
        ("-np 3 -H localhost:2 python train.py", "-np 3 is more than the 2 slots of the hosts"),
        ("-np 2 --mpi python train.py", "--mpi cannot be had: workers meet without MPI"),
        ("-np 2 --autotune python train.py", "--autotune cannot be had"),
        ("-np 2 --config-file x.yaml python train.py", "--config-file cannot be had: give its settings as options"),
        ("-np 2 --min-np 1 python train.py", "--min-num-proc cannot be had: jobs that grow and shrink"),
        ("-np 2 --blacklist-cooldown-range 1 2 python train.py", "--blacklist-cooldown-range cannot be had"),
        *((f"-np 2 {option} 3 python train.py", f"{option} cannot be had") for option in (
            "--max-num-proc", "--host-discovery-script", "--slots-per-host", "--elastic-timeout", "--reset-limit",
            "--stall-check-shutdown-time-seconds",
        )),
        ("-np 2 --torus-allreduce python train.py", "--torus-allreduce"),
    ],
)  # fmt: skip
def test_refused(text: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(monkeypatch, text) == USAGE
    assert said in capsys.readouterr().err


def test_what_reaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(run_command, "run", lambda script, **settings: found.update(script=script, **settings))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# mine\nlocalhost slots=4\n")
    options = (
        f"-np 4 --hostfile {hostfile} --gloo --hierarchical-allreduce --start-timeout 9 --fusion-threshold-mb 2 "
        f"--cycle-time-ms 3.5 --cache-capacity 7 --timeline-filename {tmp_path}/t.json --timeline-mark-cycles "
        "--stall-check-warning-time-seconds 5 --no-alias"
    )
    assert launch(monkeypatch, f"{options} python3 -u train.py --lr 0.1 -np 9") == 0
    assert found == {
        "script": Path("train.py"),
        "strategy": "horovod",
        "workers": 4,
        "deadline": 9.0,
        "alias": False,
        "arguments": ["--lr", "0.1", "-np", "9"],
    }
    timeline = str(tmp_path / "t.json")
    wanted = Settings(2 * 2**20, 7, cycle_s=3.5e-3, stall_warning_s=5.0, timeline=timeline, marks_cycles=True)
    assert Settings.read(os.environ) == wanted
    assert launch(monkeypatch, "-np 1 --no-stall-check train.py") == 0
    assert Settings.read(os.environ).stall_warning_s == 0.0


def test_what_is_built(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(monkeypatch, "--check-build") == 0
    out = capsys.readouterr().out
    assert "[X] PyTorch" in out
    assert "[ ] MPI" in out
    assert out.count("[X] Gloo") == 2
