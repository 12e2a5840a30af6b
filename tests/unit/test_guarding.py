"""Who guards a detached run: it ends as the launcher does, and starts another one only where that can go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import guarding
from paceline.engines.requests import ask, guard_of, is_under_way, launcher_of
from paceline.errors import UsageError
from paceline.running.chaos.launcher import end

LAUNCH = """
import os, signal, sys, time
from pathlib import Path
import typer
from paceline.cli.guarding import Guard
from paceline.engines.requests import Desk
directory, end = sys.argv[1:]
try:
    telling, resumed = Guard(os.dup(1)).launch()
except typer.Exit as exit:
    sys.exit(exit.exit_code)
os.write(telling, os.fsencode(directory))
os.close(telling)
print("launched", resumed, flush=True)
if end == "waits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    print("waits", flush=True)
    time.sleep(60)
if end == "saves":
    told = []
    desk = Desk(Path(directory), lambda asked: told.append(asked["do"]) or "it does")
    signal.signal(signal.SIGTERM, lambda *_: told.append("signal"))
    print("saves", flush=True)
    while len(told) < 2:
        desk.turn()
        time.sleep(0.01)
    print(sorted(told), flush=True)
    end = "killed"
os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else sys.exit(int(end))
"""


def guarded(directory: Path, end: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LAUNCH, directory, end], stdout=subprocess.PIPE)


def until_said(guard: subprocess.Popen[bytes], word: bytes) -> None:
    assert guard.stdout is not None
    shown = b""
    while word not in shown:
        piece = os.read(guard.stdout.fileno(), 1 << 10)
        assert piece, shown
        shown += piece


@pytest.mark.parametrize("status", [0, 3])
def test_a_guard_ends_as_its_launcher(tmp_path: Path, status: int) -> None:
    guard = guarded(tmp_path, str(status))
    assert guard.wait(timeout=600) == status
    assert not is_under_way(tmp_path)


def test_signals_without_a_name_are_told_by_number() -> None:
    assert guarding._name_of(signal.SIGKILL) == "SIGKILL"
    assert guarding._name_of(signal.SIGRTMIN + 1) == f"signal {signal.SIGRTMIN + 1}"


@pytest.mark.slow
def test_a_launcher_that_has_saved_nothing_is_not_started_again(tmp_path: Path) -> None:
    guard = guarded(tmp_path, "killed")
    assert guard.wait(timeout=600) == 1
    assert "has left no newer checkpoint to go on from" in (tmp_path / "output.txt").read_text()


def test_what_would_end_a_guard_ends_the_launcher(tmp_path: Path) -> None:
    guard = guarded(tmp_path, "waits")
    until_said(guard, b"waits")
    while guard_of(tmp_path) is None:
        assert guard.poll() is None
    with pytest.raises(UsageError, match="the run is ending"):
        ask(tmp_path, {"do": "stop"})
    assert guard_of(tmp_path) == guard.pid
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(timeout=600) == 130


def test_a_chaos_run_that_is_given_up_leaves_no_guard_and_no_launcher(tmp_path: Path) -> None:
    end(tmp_path / "none")
    guard = guarded(tmp_path, "saves")
    until_said(guard, b"saves")
    while guard_of(tmp_path) is None or launcher_of(tmp_path) is None:
        assert guard.poll() is None
    end(tmp_path)
    assert guard.wait(timeout=600) == -signal.SIGKILL
    while launcher_of(tmp_path) is not None:
        pass


def test_a_signal_to_both_is_one_interrupt_and_nobody_goes_on_after_it(tmp_path: Path) -> None:
    """Where the launcher dies as it saves itself, too."""
    guard = guarded(tmp_path, "saves")
    until_said(guard, b"saves")
    while guard_of(tmp_path) is None or launcher_of(tmp_path) is None:
        assert guard.poll() is None
    for process in (launcher_of(tmp_path), guard.pid):
        assert process is not None
        os.kill(process, signal.SIGTERM)
    until_said(guard, b"['signal', 'stop']")
    assert guard.wait(timeout=600) == 128 + signal.SIGKILL


@pytest.mark.slow
def test_a_run_that_was_interrupted_does_not_go_on(tmp_path: Path) -> None:
    events = (
        {"name": name, "who": "", "iteration": 9, "time_s": 1.0, "details": {}} for name in ("started", "interrupted")
    )
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    guard = guarded(tmp_path, "killed")
    assert guard.wait(timeout=600) == 1
    assert "the run goes on no more: interrupted" in (tmp_path / "output.txt").read_text()
