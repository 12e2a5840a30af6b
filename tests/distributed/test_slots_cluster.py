"""Jobs of PBS and LSF over two hosts, with stand-ins for their launchers that run what they are given here."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.distributed.harness import wait_until
from tests.distributed.small_script import write_script

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("forked_programs")]

# Both start a program in an environment of their own, in the home directory.
RUNS_HERE = 'cd / && exec env -i PATH=/usr/bin:/bin ON=second "$@"'
LAUNCHERS = {
    "pbsdsh": f'[ "$1 $2 $3" = "-n 2 --" ] || exit 9\nshift 3\n{RUNS_HERE}',
    "blaunch": f'[ "$1" = localhost ] || exit 9\nshift\n{RUNS_HERE}',
}


def run_in_job(tmp_path: Path, launcher: str, program: str) -> subprocess.CompletedProcess[str]:
    """`paceline run` on the first of a job's hosts, which has two slots; the second has one."""
    (tmp_path / launcher).write_text(f"#!/bin/bash\n{program}\n")
    (tmp_path / launcher).chmod(0o755)
    (tmp_path / "hosts").write_text(f"{socket.gethostname()}\n{socket.gethostname()}\nlocalhost\n")
    job = {
        "pbsdsh": {"PBS_JOBID": "7", "PBS_NODEFILE": str(tmp_path / "hosts")},
        "blaunch": {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")},
    }[launcher]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    environment = {**kept, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()}
    script = tmp_path / write_script(tmp_path, epochs=2)
    mark = f"""
import os
open({str(tmp_path)!r} + '/ran-on-' + os.environ.get('ON', 'first'), 'w').close()
assert not [name for name in os.listdir({str(tmp_path)!r}) if name.startswith('.paceline-job-')]
"""
    script.write_text(script.read_text() + mark)
    command = ["paceline", "run", script.name]
    options = ["--workers", "3", "--strategy", "ps-bsp:servers=1", "--out", "results"]
    return subprocess.run(
        [*command, *options], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )


def left_in(directory: Path) -> list[str]:
    """Processes that run with the job's environment and do not end."""
    wait_until(lambda: not _running(directory))
    return _running(directory)


def _running(directory: Path) -> list[str]:
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PATH", "").startswith(f"{directory}:"):
                left.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return left


@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_trains_on_two_hosts_and_leaves_nothing(tmp_path: Path, launcher: str) -> None:
    done = run_in_job(tmp_path, launcher, LAUNCHERS[launcher])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "results" / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.glob("ran-on-*")) == ["ran-on-first", "ran-on-second"]
    assert list(tmp_path.glob(".paceline-job-*")) == []
    assert left_in(tmp_path) == []


@pytest.mark.timeout(900)
def test_a_host_that_does_not_come_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    done = run_in_job(tmp_path, "blaunch", "echo no host for you; exit 1")
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split())
    assert "Ray does not start on localhost: no host for you" in said
    assert list(tmp_path.glob(".paceline-job-*")) == []
    assert left_in(tmp_path) == []
