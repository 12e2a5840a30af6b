"""Who guards a detached run: it ends as the launcher does, and starts another one only where that can go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.engines.requests import guard_of, is_under_way

LAUNCH = """
import os, signal, sys, time
import typer
from paceline.cli.guarding import Guard
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
os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else sys.exit(int(end))
"""


def guarded(directory: Path, end: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LAUNCH, directory, end], stdout=subprocess.PIPE)


@pytest.mark.parametrize("status", [0, 3])
def test_a_guard_ends_as_its_launcher(tmp_path: Path, status: int) -> None:
    guard = guarded(tmp_path, str(status))
    assert guard.wait(timeout=60) == status
    assert not is_under_way(tmp_path)


def test_a_launcher_that_has_saved_nothing_is_not_started_again(tmp_path: Path) -> None:
    guard = guarded(tmp_path, "killed")
    assert guard.wait(timeout=60) == 1
    assert "has left no newer checkpoint to go on from" in (tmp_path / "output.txt").read_text()


def test_what_would_end_a_guard_ends_the_launcher(tmp_path: Path) -> None:
    guard = guarded(tmp_path, "waits")
    assert guard.stdout is not None
    shown = b""
    while b"waits" not in shown:
        shown += os.read(guard.stdout.fileno(), 1 << 10)
    while guard_of(tmp_path) is None:
        assert guard.poll() is None
    assert guard_of(tmp_path) == guard.pid
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(timeout=60) == 130
