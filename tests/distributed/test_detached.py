"""`paceline run --detach`: who started the run and who looks on may go; who keeps it is needed, and leaves nothing."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import paceline
from paceline.checkpoint_files import iteration_of
from paceline.engines.requests import launcher_of
from tests.distributed.harness import AGENTS_GRACE_S, PACELINE, Command, is_training, pids, wait_until
from tests.distributed.local import Listener
from tests.distributed.test_elastic import SCRIPT, require_each_sample_once, require_same_model, undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.slow]
WITHIN_S = 120.0
INTERRUPTED = 130


def begin(start: Callable[..., Command], out: Path, *options: object, epochs: int, step_s: float) -> Command:
    """Starts a detached run, whose launcher is killed before it returns."""
    log = out.parent / "log"
    log.mkdir()
    given = ["--log", log, "--epochs", epochs, "--step-s", step_s]
    launcher: Command = start("run", SCRIPT, "--workers", 2, "--detach", "--out", out, *options, "--", *given)
    children = psutil.Process(launcher.process.pid).children
    assert wait_until(lambda: any(os.getsid(child.pid) == child.pid for child in children()), within_s=WITHIN_S)
    launcher.process.kill()
    assert launcher.process.wait() == -signal.SIGKILL
    assert wait_until(lambda: is_training(out), within_s=WITHIN_S)
    return launcher


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
    return attached.wait(timeout=30)


@pytest.mark.timeout(600)
def test_a_run_outlives_who_started_it_and_who_looks_on(start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launcher = begin(start, out, epochs=5, step_s=0.35)
    stays, interrupted = start("attach", out), start("attach", out)
    assert show_on_a_terminal_that_is_closed(out) == -signal.SIGHUP
    assert interrupted.says("step ")
    interrupted.interrupt()
    assert f"{out} goes on; paceline stop {out} ends it" in interrupted.wait()
    assert interrupted.status == INTERRUPTED
    keeper = launcher_of(out)
    assert keeper is not None
    assert os.getsid(keeper) == keeper

    told = stays.wait()
    assert stays.status == 0, told
    assert "all-reduce x 2: step " in told
    assert told.rstrip().endswith(f"{out}: ended")
    assert "iterations     60" in told  # as the command itself says it at the end
    require_each_sample_once(out, epochs=5)
    require_same_model(out, undisturbed(workers=2, epochs=5))
    launcher.assert_nothing_left()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("victim", "after"),
    [
        ("keeper", {"strategy": "all-reduce", "workers": 3, "elastic": "1:3"}),
        ("head node", {"strategy": "diloco:every=3", "workers": 3, "elastic": "1:3"}),
    ],
)
def test_after_the_keepers_or_the_head_nodes_death_resume_goes_on(start, tmp_path: Path, victim: str, after) -> None:
    """With another number of workers; after the head node's, on which Ray and all members die at once, under another
    strategy, too."""
    out = tmp_path / "out"
    launcher = begin(start, out, "--checkpoint-every", 5, epochs=3, step_s=0.3)
    attached = start("attach", out)
    assert wait_until((out / "checkpoint.pt").exists, within_s=WITHIN_S)
    keeper, members = launcher_of(out), pids(out).values()
    assert keeper is not None
    everybody = [int(line.split()[0]) for line in launcher.processes()]
    for pid in [keeper] if victim == "keeper" else everybody:
        os.kill(pid, signal.SIGKILL)
    died_s = time.monotonic()
    assert wait_until(lambda: not any(map(psutil.pid_exists, members)), within_s=20.0)
    print(f"{time.monotonic() - died_s:.1f} s from the death of the {victim} until no worker was left")
    assert attached.wait().rstrip().endswith(f"{out}: cut off")
    assert attached.status == 1
    launcher.assert_nothing_left(within_s=AGENTS_GRACE_S)

    saved = iteration_of(out / "checkpoint.pt")
    assert saved is not None
    assert 5 <= saved < 36
    given = ["--log", str(tmp_path / "log"), "--epochs", "3"]
    result = paceline.run(SCRIPT, arguments=given, resume=out, out=tmp_path / "resumed", watcher=Listener(), **after)
    # Until a round's exchange is done, its local steps have the iteration of the round before.
    assert min(step.iteration for step in result.steps) == saved + (after["strategy"] == "all-reduce")
    evaluations = (result.directory / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(evaluations[-1])["samples"] == 3 * 96
    if after["strategy"] == "all-reduce":
        require_same_model(result.directory, undisturbed(workers=2, epochs=3))
