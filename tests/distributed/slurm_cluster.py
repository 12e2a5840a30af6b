"""A SLURM of its own: a controller and two of its daemons on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.distributed.harness import wait_until
from tests.ports import free_port

WITHIN_S = 400.0
PACELINE = str(Path(sys.executable).with_name("paceline"))

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
ReturnToService=2
SlurmctldPidFile={home}/controller.pid
SlurmdPidFile={home}/%n.pid
SlurmdSpoolDir={home}/spool-%n
StateSaveLocation={home}
NodeName=n1 NodeHostname=localhost Port={first} CPUs=2
NodeName=n2 NodeHostname=localhost Port={second} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """What the tests ask of it."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self.home, self.environment = home, environment
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> None:
        """A daemon, whose words go to a file called after it."""
        with (self.home / f"{command[0]}{command[-1] if command[0] == 'slurmd' else ''}.out").open("ab") as log:
            self.daemons.append(
                subprocess.Popen(
                    command, env=self.environment, stdout=log, stderr=log, start_new_session=True, cwd=self.home
                )
            )

    @contextmanager
    def dead(self, host: str) -> Iterator[None]:
        """All that runs on the host is killed at once, its daemon too, and it is back afterwards."""
        processes = list(self._on(host))
        # All at once: srun leaves a process behind that ends the step on the other hosts as soon as srun is dead.
        for strike in (psutil.Process.suspend, psutil.Process.kill):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    strike(process)
        self.ask("scontrol", "update", f"nodename={host}", "state=down", "reason=dead")
        try:
            yield
        finally:
            self.start("slurmd", "-D", "-N", host)
            self._resume(host)

    def _resume(self, host: str) -> None:
        """The controller refuses it for a host that it has found to be back by itself."""
        command, give_up_s = ["scontrol", "update", f"nodename={host}", "state=resume"], time.monotonic() + WITHIN_S
        while "down" in self.ask("sinfo", "-h", "-n", host, "-o", "%T"):
            subprocess.run(command, env=self.environment, capture_output=True, check=False)
            assert time.monotonic() < give_up_s
            time.sleep(0.2)

    def _on(self, host: str) -> Iterator[psutil.Process]:
        """Jobs' processes there, who started them, and the daemon."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                its = process.environ()
                if its.get("SLURM_CONF") != self.environment["SLURM_CONF"]:
                    continue
                if its.get("SLURMD_NODENAME") == host:
                    yield from (parent for parent in [process.parent()] if parent and parent.name() == "slurmstepd")
                    yield process
                elif process.cmdline()[-2:] == ["-N", host]:
                    yield process

    def ask(self, *command: str, **settings: Any) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=WITHIN_S, **settings
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *options: str, cwd: Path) -> str:
        """The job's number."""
        said = self.ask(PACELINE, "slurm", *options, cwd=cwd)
        return said.split("Submitted batch job ")[1].split(";")[0]

    def state(self, job: str) -> str:
        shown = self.ask("scontrol", "show", "job", "-o", job)
        return dict(field.partition("=")[::2] for field in shown.split())["JobState"]

    def wait(self, job: str, *states: str) -> str:
        give_up_s = time.monotonic() + WITHIN_S
        while (state := self.state(job)) not in states:
            assert time.monotonic() < give_up_s, state
            time.sleep(0.5)
        return state


@contextmanager
def started(home: Path) -> Iterator[Slurm]:
    """A controller and two of its daemons, which keep what is theirs in `home`."""
    home.chmod(0o755)
    (home / "key").write_bytes(os.urandom(1024))
    (home / "key").chmod(0o600)
    ports = {name: free_port() for name in ("controller", "first", "second")}
    (home / "slurm.conf").write_text(CONFIGURATION.format(home=home, **ports))
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    modules = os.pathsep.join([os.path.join(os.getcwd(), "tests", "patient"), os.getcwd()])
    environment = {**os.environ, "SLURM_CONF": str(home / "slurm.conf"), "PATH": path, "PYTHONPATH": modules}
    for name in ("spool-n1", "spool-n2"):
        (home / name).mkdir()
    files = [f"--{name}-file={home}/{name}" for name in ("key", "pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", *files, f"--socket={home}/munge.socket"],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    made = Slurm(home, environment)
    for command in commands:
        made.start(*command)
        if command[0] == "munged":
            wait_for(home / "munge.socket")
    try:
        give_up_s = time.monotonic() + WITHIN_S
        while (
            "idle" not in subprocess.run(["sinfo"], env=environment, capture_output=True, text=True, check=False).stdout
        ):
            assert time.monotonic() < give_up_s
            time.sleep(0.2)
        yield made
    finally:
        for process in reversed(made.daemons):
            process.terminate()
        for process in made.daemons:
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(path: Path) -> None:
    give_up_s = time.monotonic() + WITHIN_S
    while not path.exists():
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def left_of(job: str, slurm: Slurm) -> list[str]:
    """Processes of the job that are there and do not end."""
    wait_until(lambda: not _running(job, slurm))
    return _running(job, slurm)


def _running(job: str, slurm: Slurm) -> list[str]:
    left = []
    for process in psutil.process_iter():
        try:
            its = process.environ()
            is_its_own = job in (its.get("SLURM_JOB_ID"), its.get("SLURM_ARRAY_JOB_ID"))
            if is_its_own and its.get("SLURM_CONF") == slurm.environment["SLURM_CONF"]:
                left.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return left
