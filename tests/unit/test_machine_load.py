"""How much of a machine other programs use: by hand, and of processes that compute."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from paceline.running import machine_load
from paceline.running.machine_load import Usage, between


def test_what_others_use_by_hand() -> None:
    before = Usage(10.0, 100.0, {1: 5.0, 2: 7.0}, num_cores=4)
    # In 2 s of 4 cores 6 s were used: 1 s by process 1, and 2 s by process 3, which is new; process 2 has ended.
    after = Usage(12.0, 106.0, {1: 6.0, 3: 2.0}, num_cores=4)
    assert between(before, after) == pytest.approx(3 / 8)


def test_clocks_that_do_not_agree_leave_it_a_part() -> None:
    before = Usage(10.0, 100.0, {1: 5.0}, num_cores=1)
    assert between(before, Usage(11.0, 100.5, {1: 6.0}, num_cores=1)) == 0
    assert between(before, Usage(11.0, 101.1, {1: 5.0}, num_cores=1)) == 1


@pytest.fixture
def computing() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_process_that_was_started_here_is_none_of_the_others(computing: subprocess.Popen[bytes]) -> None:
    before = Usage.now()
    used_s = 0.0
    while used_s < 0.2:  # of processor time, however busy the machine is
        time.sleep(0.05)
        after = Usage.now()
        used_s = after.own_s[computing.pid] - before.own_s[computing.pid]
    assert after.busy_s - before.busy_s >= 0.5 * used_s, "the system's clock ticks, but it has seen most of it"


@pytest.mark.parametrize(
    ("windows", "least", "num_windows"),
    [([0.05, 0.9], 0.05, 1), ([0.9, 0.4, 0.05, 0.9], 0.05, 3), ([0.9, 0.5, 0.6, 0.7, 0.8], 0.5, 5)],
)
def test_what_is_soon_over_does_not_count(
    windows: list[float], least: float, num_windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_load, "_WINDOW_S", 0.0)
    left = iter(windows)
    monkeypatch.setattr(machine_load, "between", lambda before, after: next(left))
    assert machine_load.used_by_others() == least
    assert len(windows) - len(list(left)) == num_windows


def test_a_process_that_ends_meanwhile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        handle = psutil.Process(ended.pid)
    monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: [handle])
    assert set(Usage.now().own_s) == {os.getpid()}
