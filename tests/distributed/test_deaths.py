"""A worker, a server or the launcher is killed: the run ends soon, says who died and when, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import paceline
from tests.distributed.harness import AGENTS_GRACE_S, COLD, TRAIN, events, is_training, pids, wait_until

pytestmark = pytest.mark.ray
LIMIT_S = 240.0  # of a busy machine; the deadline, at which the survivors would find out by themselves, is 300 s


@pytest.mark.parametrize(
    ("strategy", "victim", "num_workers"),
    [
        pytest.param("all-reduce", "worker-1", 2, marks=pytest.mark.slow),
        pytest.param("ps-asp", "worker-0", 2, marks=pytest.mark.slow),
        ("ps-bsp", "server-1", 2),
    ],
)
def test_death_in_the_middle_of_a_step(start, tmp_path: Path, strategy: str, victim: str, num_workers: int) -> None:
    out = tmp_path / "out"
    kind, number = victim.split("-")
    options = ["--option", "servers=2"] if victim == "server-1" else []
    command = start(
        "run", TRAIN, "--strategy", strategy, "--workers", num_workers, "--out", out, *options, "--",
        "--fault", "kill" if kind == "worker" else "kill-server", "--rank", number, "--step", 5, "--step-s", 0.02,
        "--loaders", 2, "--child", "--results", out, **(COLD if strategy == "all-reduce" else {}),
    )  # fmt: skip
    output = command.wait()
    took_s = time.time() - float((out / "struck").read_text())
    print(f"{strategy} {victim}: {took_s:.1f} s from the kill to the end")

    assert command.status == 1
    assert took_s < LIMIT_S
    pid = pids(out)[victim]
    assert f"{kind} {number} (process {pid}) died" in output
    if strategy == "all-reduce":
        assert re.search(r"died during step 5$", output, re.MULTILINE)
    elif strategy == "ps-bsp":  # workers serve themselves until they hear of it
        step = re.search(r"died during step (\d+)$", output, re.MULTILINE)
        assert step
        assert int(step[1]) >= 5
    elif kind == "worker":
        assert re.search(r"died during step 5 or shortly after$", output, re.MULTILINE)
    else:
        assert re.search(r"died after update \d+ or shortly after$", output, re.MULTILINE)
    assert "Traceback" not in output
    assert "raylet" not in output
    command.assert_nothing_left()


def checkpoints(out: Path) -> list[dict[str, Any]]:
    return [event for event in events(out) if event["name"] == "checkpoint"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_launcher(start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = start(
        "run", TRAIN, "--strategy", "ps-bsp", "--workers", 2, "--out", out, "--",
        "--step-s", 0.05, "--loaders", 2, "--child",
    )  # fmt: skip
    assert wait_until(lambda: is_training(out))
    assert len(command.processes()) >= 10
    command.process.kill()
    began_s = time.monotonic()
    command.process.wait()
    command.assert_nothing_left(within_s=AGENTS_GRACE_S)
    print(f"{time.monotonic() - began_s:.1f} s from the launcher's death until nothing was left")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["all-reduce", "ps-asp"])
@pytest.mark.usefixtures("ray_here")
def test_all_killed_lose_half_a_minute_at_most(start, tmp_path: Path, strategy: str) -> None:
    """Nobody asked for evaluations: checkpoints come by time alone."""
    out = tmp_path / "out"
    command = start(
        "run", TRAIN, "--strategy", strategy, "--workers", 2, "--out", out, "--",
        "--step-s", 0.05, "--steps", 100_000,
    )  # fmt: skip
    assert wait_until(lambda: checkpoints(out))
    for pid in [*pids(out).values(), command.process.pid]:
        os.kill(pid, signal.SIGKILL)
    command.process.wait()
    command.assert_nothing_left(within_s=AGENTS_GRACE_S)
    (saved, *_) = checkpoints(out)
    assert saved["time_s"] <= 30.0 + 10.0  # on the training clock; a step is long on a busy machine
    result = paceline.run(TRAIN, strategy=strategy, workers=2, resume=out, out=out, max_steps=1)
    assert result.iteration >= saved["iteration"] > 0


@pytest.mark.slow
def test_two_deaths_at_once_are_both_named(start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = start("run", TRAIN, "--workers", 3, "--out", out, "--", "--step-s", 0.05)
    assert wait_until(lambda: is_training(out))
    members = pids(out)
    for name in ("worker-0", "worker-2"):
        os.kill(members[name], signal.SIGKILL)
    output = command.wait()
    for number in (0, 2):
        assert f"worker {number} (process {members[f'worker-{number}']}) died during step" in output
    assert "worker 1" not in output
