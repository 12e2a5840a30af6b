"""The launcher waits for last words of those that may still have some. For the dead it does not: these runs end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.distributed.harness import TRAIN, events

pytestmark = pytest.mark.ray
INTERRUPTED = 130
PATIENT = """
import os, signal, sys
from paceline.cli import main
from paceline.engines.ray import supervisor
supervisor._FAREWELL_S = 1e9
"""
SERVER_DIES_AT_THE_END = """
part = supervisor.Supervisor._part
def kill_and_part(self):
    os.kill(self._members.pids["server-0"], signal.SIGKILL)
    part(self)
supervisor.Supervisor._part = kill_and_part
"""
INTERRUPT_BEFORE_THE_VERDICT = """
def judge(*_, **__):
    raise KeyboardInterrupt
supervisor.judge = judge
"""
END = "sys.exit(main())"


def test_a_server_that_dies_once_all_workers_have_ended(start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = start(
        "-c", PATIENT + SERVER_DIES_AT_THE_END + END, "run", TRAIN, "--strategy", "ps-asp", "--workers", 1,
        "--out", out, "--", "--steps", 5, program=sys.executable,
    )  # fmt: skip
    command.wait()
    assert command.status == 0
    command.assert_nothing_left()


def test_an_interrupt_beside_a_dead_worker(start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = start(
        "-c", PATIENT + INTERRUPT_BEFORE_THE_VERDICT + END, "run", TRAIN, "--workers", 1, "--out", out, "--",
        "--fault", "kill", "--rank", 0, "--step", 3, "--results", out, program=sys.executable,
    )  # fmt: skip
    command.wait()
    assert command.status == INTERRUPTED
    assert "interrupted" in [event["name"] for event in events(out)]
    command.assert_nothing_left()
