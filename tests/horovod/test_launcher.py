"""The command line of Horovod's launcher: what reaches the run, and what is refused before anything starts."""

from __future__ import annotations

import dataclasses
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
        ("-np 2", "say after the options what to run, as in python train.py"),
        ("-np 2 -p 22 ls", "--ssh-port and --ssh-identity-file have no effect"),
        ("-np 2 -H localhost:2 -p 22 python train.py", "--ssh-port and --ssh-identity-file have no effect"),
        ("-np 3 -H far.example:2 python train.py", "-np 3 is more than the 2 slots of the hosts"),
        ("-np 3 -H localhost:2 python train.py", "-np 3 is more than the 2 slots of the hosts"),
        ("-np 2 --mpi python train.py", "--mpi cannot be had: workers meet without MPI"),
        ("-np 2 --autotune python train.py", "--autotune cannot be had"),
        ("-np 2 --config-file nowhere.yaml python train.py", "cannot read the config file nowhere.yaml: No such file"),
        ("-np 2 --blacklist-cooldown-range 1 2 python train.py", "--blacklist-cooldown-range is for elastic jobs"),
        *((f"-np 2 {option} 3 python train.py", f"{option} is for elastic jobs") for option in (
            "--max-num-proc", "--slots-per-host", "--elastic-timeout", "--reset-limit",
        )),
        ("-np 2 --min-np 3 python train.py", "--min-num-proc 3, -np 2 are to be given the smallest first"),
        ("-np 2 --min-np 1 --blacklist-cooldown-range 9 2 python train.py", "a cooldown range is two numbers"),
        ("-np 2 --host-discovery-script ./hosts -H a:2 python train.py", "give hosts, or --host-discovery-script"),
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
        "--stall-check-warning-time-seconds 5 --stall-check-shutdown-time-seconds 9 --no-alias"
    )
    assert launch(monkeypatch, f"{options} python3 -u train.py --lr 0.1 -np 9") == 0
    assert found == {
        "script": Path("train.py"),
        "strategy": "horovod",
        "workers": 4,
        "start_deadline": 9.0,
        "alias": False,
        "arguments": ["--lr", "0.1", "-np", "9"],
    }
    timeline = str(tmp_path / "t.json")
    about = {"timeline": timeline, "marks_cycles": True}
    wanted = Settings(2 * 2**20, 7, cycle_s=3.5e-3, stall_warning_s=5.0, stall_shutdown_s=9.0, **about)
    assert Settings.read(os.environ) == wanted
    assert launch(monkeypatch, "-np 1 --no-stall-check train.py") == 0
    assert Settings.read(os.environ).stall_warning_s == 0.0


def test_what_is_built(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(monkeypatch, "--check-build") == 0
    out = capsys.readouterr().out
    assert "[X] PyTorch" in out
    assert "[ ] MPI" in out
    assert out.count("[X] Gloo") == 2


CONFIG = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 5
  cache_capacity: 16
  hierarchical_allreduce: true
  hierarchical_allgather: false
autotune:
  enabled: false
timeline:
  filename: far.json
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 300
library_options:
  gloo_timeout_seconds: 77
"""


def test_a_config_file_says_what_the_command_line_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(run_command, "run", lambda script, **settings: found.update(script=script, **settings))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    assert launch(monkeypatch, "-np 2 --config-file config.yaml --cycle-time-ms 9 python train.py") == 0
    assert found["start_deadline"] == 77.0
    wanted = Settings(32 * 2**20, 16, cycle_s=9e-3, timeline=str(tmp_path / "far.json"), marks_cycles=True)
    wanted = dataclasses.replace(wanted, stall_warning_s=0.0, stall_shutdown_s=0.0)  # as the check is off
    assert Settings.read(os.environ) == wanted
    assert os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "300"


def test_a_zero_on_the_command_line_is_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_command, "run", lambda script, **settings: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    options = "--fusion-threshold-mb 0 --cache-capacity 0 --config-file config.yaml"
    assert launch(monkeypatch, f"-np 2 {options} python train.py") == 0
    found = Settings.read(os.environ)
    assert (found.fusion_bytes, found.num_remembered) == (0, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("params: [1]", "params is to hold names and values, not [1]"),
        ("parms: {cycle_time_ms: 1}", "there is no section 'parms'; did you mean 'params'?"),
        ("params: {cycle_time: 1}", "params.cycle_time has no effect here; did you mean 'cycle_time_ms'?"),
        ("params: {cycle_time_ms: fast}", "params.cycle_time_ms is a number that is not negative, not 'fast'"),
        ("params: {fusion_threshold_mb: -1}", "params.fusion_threshold_mb is a number that is not negative, not -1"),
        ("params: {torus_allreduce: true}", "params.torus_allreduce has no effect here"),
        ("timeline: {mark_cycles: 2}", "timeline.mark_cycles is true or false, not 2"),
        ("autotune: {enabled: true}", "--autotune cannot be had"),
        ("controller: mpi", "--mpi cannot be had"),
        ("controller: nccl", "controller is gloo or mpi, not 'nccl'"),
        ("- 1", "has no sections"),
        ("params: {", "is not YAML"),
    ],
)
def test_refused_config_files(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert launch(monkeypatch, f"-np 2 --config-file {tmp_path}/c.yaml python train.py") == USAGE
    assert said in " ".join(capsys.readouterr().err.split())
