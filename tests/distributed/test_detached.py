"""`paceline run --detach`: who started the run and who looks on may go, and so may who keeps it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import paceline
from paceline.checkpoint_files import iteration_of
from paceline.engines.requests import guard_of, is_under_way, launcher_of
from tests.distributed.harness import (
    AGENTS_GRACE_S,
    PACELINE,
    PATIENCE_S,
    Command,
    events,
    is_training,
    pids,
    wait_until,
)
from tests.distributed.local import Listener
from tests.distributed.test_elastic import SCRIPT, require_each_sample_once, require_same_model, undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.slow]
INTERRUPTED = 130
HELD_AT = 20


def begin(start: Callable[..., Command], out: Path, *options: object, epochs: int) -> Command:
    """Starts a detached run, whose launcher is killed before it returns. It waits in the middle for `go_on`."""
    log = out.parent / "log"
    log.mkdir()
    given = ["--log", log, "--epochs", epochs, "--step-s", 0.05, "--hold", HELD_AT]
    launcher: Command = start("run", SCRIPT, "--workers", 2, "--detach", "--out", out, *options, "--", *given)
    children = psutil.Process(launcher.process.pid).children
    assert wait_until(lambda: any(os.getsid(child.pid) == child.pid for child in children()))
    launcher.process.kill()
    assert launcher.process.wait() == -signal.SIGKILL
    assert wait_until(lambda: is_training(out))
    return launcher


def go_on(out: Path) -> None:
    (out.parent / "log" / f"go-{HELD_AT}").touch()


def show_on_a_terminal_that_is_closed(out: Path) -> int:
    """The status of `paceline attach` there, which has shown a step."""
    terminal, inside = os.openpty()
    attached = subprocess.Popen(
        [PACELINE, "attach", str(out)],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(inside)
    shown = b""
    while b"step " not in shown:
        shown += os.read(terminal, 1 << 16)
    os.close(terminal)
    return attached.wait(timeout=PATIENCE_S)


@pytest.mark.timeout(900)
def test_a_run_outlives_who_started_it_and_who_looks_on(start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launcher = begin(start, out, epochs=5)
    stays, interrupted = start("attach", out), start("attach", out)
    assert show_on_a_terminal_that_is_closed(out) == -signal.SIGHUP
    assert interrupted.says("step ")
    interrupted.interrupt()
    assert f"{out} goes on; paceline stop {out} ends it" in interrupted.wait()
    assert interrupted.status == INTERRUPTED
    keeper = launcher_of(out)
    assert keeper is not None
    assert os.getsid(keeper) == guard_of(out)
    assert stays.says("step ")
    go_on(out)
    told = stays.wait()
    assert stays.status == 0, told
    assert "all-reduce x 2: step " in told
    assert told.rstrip().endswith(f"{out}: ended")
    assert "iterations     60" in told  # as the command itself says it at the end
    require_each_sample_once(out, epochs=5)
    require_same_model(out, undisturbed(workers=2, epochs=5))
    launcher.assert_nothing_left()


@pytest.mark.timeout(900)
def test_a_run_outlives_its_launcher_and_then_its_guard(start, tmp_path: Path) -> None:
    """What came after the checkpoint is trained anew, to the undisturbed run's model."""
    out = tmp_path / "out"
    command = begin(start, out, "--checkpoint-every", 5, epochs=4)
    attached = start("attach", out)
    assert wait_until((out / "checkpoint.pt").exists)
    killed, guard, members = launcher_of(out), guard_of(out), pids(out).values()
    assert killed is not None
    assert guard is not None
    os.kill(killed, signal.SIGKILL)
    assert wait_until(lambda: not any(map(psutil.pid_exists, members)))
    assert is_under_way(out)
    assert wait_until(lambda: launcher_of(out) not in (None, killed))
    os.kill(guard, signal.SIGKILL)
    go_on(out)
    told = attached.wait()
    assert attached.status == 0, told
    assert "the launcher was killed; another one goes on: resumed by the guard from iteration" in told
    assert told.rstrip().endswith(f"{out}: ended")
    _, lost, resumed, _ = (event for event in events(out) if event["name"] in ("launcher_lost", "resumed", "started"))
    assert (lost["details"]["process"], lost["details"]["why"]) == (killed, "SIGKILL")
    assert resumed["details"]["why"].startswith("resumed by the guard from iteration ")
    evaluations = (out / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(evaluations[-1])["samples"] == 4 * 96
    require_same_model(out, undisturbed(workers=2, epochs=4))
    command.assert_nothing_left(within_s=AGENTS_GRACE_S)


@pytest.mark.timeout(900)
def test_after_the_head_nodes_death_resume_goes_on(start, tmp_path: Path) -> None:
    """On which guard, launcher, Ray and all members die at once; with other workers, under another strategy."""
    out = tmp_path / "out"
    launcher = begin(start, out, "--checkpoint-every", 5, epochs=3)
    attached = start("attach", out)
    assert wait_until((out / "checkpoint.pt").exists)
    for line in launcher.processes():
        os.kill(int(line.split()[0]), signal.SIGKILL)
    assert attached.wait().rstrip().endswith(f"{out}: cut off")
    assert attached.status == 1
    launcher.assert_nothing_left(within_s=AGENTS_GRACE_S)

    saved = iteration_of(out / "checkpoint.pt")
    assert saved is not None
    assert 5 <= saved <= HELD_AT
    given = ["--log", str(tmp_path / "log"), "--epochs", "3"]
    settings = {"strategy": "diloco:every=3", "workers": 3, "elastic": "1:3"}
    resumed = tmp_path / "resumed"
    result = paceline.run(SCRIPT, arguments=given, resume=out, out=resumed, watcher=Listener(), **settings)
    # Until a round's exchange is done, its local steps have the iteration of the round before.
    assert min(step.iteration for step in result.steps) == saved
    evaluations = (result.directory / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(evaluations[-1])["samples"] == 3 * 96
