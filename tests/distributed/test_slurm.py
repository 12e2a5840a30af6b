"""Jobs of a real SLURM: a controller and two of its daemons on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings

from paceline.checkpoint import FILE_NAME
from paceline.engines.scripting import read_script
from paceline.lab.study import Study
from paceline.scheduler import expand
from tests.conformance import local_engine
from tests.distributed.harness import events
from tests.ports import free_port
from tests.unit.test_scheduler import hostlists

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
MISSING = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
WITHIN_S = 400.0
PACELINE = str(Path(sys.executable).with_name("paceline"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)}: not installed (Debian's slurm-wlm and munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons are to run as root"),
]

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


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    home = tmp_path_factory.mktemp("slurm")
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
    """Processes of the job that are still there."""
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


SCRIPT = """
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset
worker = paceline.init()
model = torch.nn.Linear(4, 1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = worker.prepare(model, optimizer, DataLoader(data, batch_size=8))
import time
from pathlib import Path
for epoch in range({epochs}):
    while {waits} and epoch == {epochs} - 1 and not Path({go!r}).exists():
        time.sleep(0.05)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep({pause_s})
"""


def write_script(directory: Path, *, epochs: int, pause_s: float = 0.0, waits: bool = False) -> str:
    """`waits`: before its last pass, until there is a file `go` beside it."""
    (directory / "train.py").write_text(
        SCRIPT.format(epochs=epochs, pause_s=pause_s, waits=waits, go=str(directory / "go"))
    )
    return "train.py"


def test_a_job_on_two_hosts_trains_under_servers_and_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    script = write_script(tmp_path, epochs=5)
    job = slurm.submit(script, "--nodes", "2", "--cores", "2", "--strategy", "ps-bsp:servers=2", cwd=tmp_path)
    state = slurm.wait(job, "COMPLETED", "FAILED")
    said = (tmp_path / "runs" / f"slurm-{job}.log").read_text()
    assert state == "COMPLETED", said
    results = tmp_path / "runs" / f"slurm-{job}"
    assert (results / "model.safetensors").exists()
    assert len((results / "steps.csv").read_text().splitlines()) == 1 + 2 * 5 * 4
    assert left_of(job, slurm) == []


def test_two_jobs_share_a_host_and_each_ends_only_its_own(slurm: Slurm, tmp_path: Path) -> None:
    folders = {epochs: tmp_path / str(epochs) for epochs in (5, 7)}
    for folder in folders.values():
        folder.mkdir()
    jobs = {
        epochs: slurm.submit(
            write_script(folder, epochs=epochs, pause_s=0.1, waits=epochs == 7),
            "--nodes",
            "1",
            "--cores",
            "1",
            "--sbatch",
            "nodelist=n1",
            cwd=folder,
        )
        for epochs, folder in folders.items()
    }
    results = {epochs: folders[epochs] / "runs" / f"slurm-{job}" for epochs, job in jobs.items()}
    for result in results.values():
        wait_for_steps(result / "steps.csv")
    assert slurm.wait(jobs[5], "COMPLETED", "FAILED") == "COMPLETED"
    assert slurm.state(jobs[7]) == "RUNNING"
    (folders[7] / "go").touch()
    assert slurm.wait(jobs[7], "COMPLETED", "FAILED") == "COMPLETED"
    for epochs, result in results.items():
        assert len((result / "steps.csv").read_text().splitlines()) == 1 + epochs * 8
        assert left_of(jobs[epochs], slurm) == []


def test_a_job_whose_time_is_over_saves_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    script = write_script(tmp_path, epochs=40, pause_s=0.1)
    job = slurm.submit(script, "--nodes", "1", "--cores", "2", "--workers", "2", cwd=tmp_path)
    wait_for_steps(tmp_path / "runs" / f"slurm-{job}" / "steps.csv")
    queue_again(slurm, job)
    state = slurm.wait(job, "COMPLETED", "FAILED")
    said = (tmp_path / "runs" / f"slurm-{job}.log").read_text()
    assert state == "COMPLETED", said
    assert "interrupted; saved at iteration" in said
    steps = (tmp_path / "runs" / f"slurm-{job}" / "steps.csv").read_text().splitlines()[1:]
    assert len(steps) == 2 * 40 * 4  # no step twice, none left out


LIGHTNING = """
import sys, time
import lightning.pytorch as pl, torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from paceline.lightning import PacelineStrategy
class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        time.sleep(float(sys.argv[1]))
        return F.mse_loss(self.layer(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(strategy=PacelineStrategy(), max_epochs=40, **quiet)
x = torch.randn(64, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
trainer.fit(Line(), data)
print("came to step", trainer.global_step)
"""


@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed (paceline[frameworks])")
def test_a_job_of_lightnings_goes_on_from_lightnings_checkpoint(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)
    given = ["train.py", "--nodes", "1", "--cores", "2", "--workers", "2", "--", "0.1"]
    job = slurm.submit(*given, cwd=tmp_path)
    results = tmp_path / "runs" / f"slurm-{job}"
    wait_for_steps(results / "steps.csv")
    queue_again(slurm, job)
    state = slurm.wait(job, "COMPLETED", "FAILED")
    said = (tmp_path / "runs" / f"slurm-{job}.log").read_text()
    assert state == "COMPLETED", said
    assert "have it go on from its last one by fit(ckpt_path=...)" in said
    assert "came to step 160" in said
    parts = [results.with_name(f"{results.name}-before-1"), results]
    assert sum(len((part / "steps.csv").read_text().splitlines()) - 1 for part in parts) == 2 * 160
    assert not any((part / FILE_NAME).exists() for part in parts)
    monkeypatch.chdir(tmp_path)  # where the script saves
    whole = read_script(tmp_path / "train.py", ["0"])
    local_engine.run(whole, strategy="all-reduce", workers=2, out=tmp_path / "whole")
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (results / "model.safetensors").read_bytes()


def queue_again(slurm: Slurm, job: str) -> None:
    """Tell the job that its time is over, and have it started again at once."""
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    slurm.wait(job, "PENDING")
    # SLURM would let two minutes pass. In the second in which a host ended a job it refuses to start it anew, and
    # SLURM calls the job failed: the new credential is as old as the revocation of the one before.
    time.sleep(2.0)
    slurm.ask("scontrol", "update", f"jobid={job}", "StartTime=now")


def test_an_array_of_jobs_makes_one_report(slurm: Slurm, tmp_path: Path) -> None:
    script = write_script(tmp_path, epochs=2)
    study = ["--strategies", "all-reduce,ps-bsp", "--workers", "1", "--seeds", "1"]
    job = slurm.submit(script, "--compare", *study, "--cores", "1", cwd=tmp_path)
    for task in (1, 2):
        state = slurm.wait(f"{job}_{task}", "COMPLETED", "FAILED")
        assert state == "COMPLETED", (tmp_path / "studies" / f"train-{job}_{task}.log").read_text()
    results = tmp_path / "studies" / "train"
    ended_s = [(results / "trials" / trial.id).stat().st_ctime for trial in Study.open(results).spec.trials]
    last = 1 + ended_s.index(max(ended_s))
    said = {task: (tmp_path / "studies" / f"train-{job}_{task}.log").read_text() for task in (1, 2)}
    assert "Report:" in said[last], said
    if abs(ended_s[0] - ended_s[1]) > 10.0:  # else both may have found that all had ended
        assert "Report:" not in said[3 - last], said
    assert Study.open(results).frames.trials["status"].tolist() == ["finished", "finished"]
    assert (results / "report.html").exists()
    assert left_of(job, slurm) == []


def wait_for_steps(path: Path, *, workers: int = 1) -> None:
    """Until so many workers have recorded ten steps each, or more."""
    give_up_s = time.monotonic() + WITHIN_S
    while sum(num >= 10 for num in lines_by_rank(path).values()) < workers:
        assert time.monotonic() < give_up_s
        time.sleep(0.2)


def lines_by_rank(path: Path) -> Counter[str]:
    return Counter(line.partition(",")[0] for line in path.read_text().splitlines()) if path.exists() else Counter()


def elastic_job(slurm: Slurm, directory: Path) -> str:
    """One that trains on both hosts."""
    script = write_script(directory, epochs=5, pause_s=0.1, waits=True)
    job = slurm.submit(script, "--nodes", "2", "--cores", "2", "--elastic", "1:2", cwd=directory)
    wait_for_steps(directory / "runs" / f"slurm-{job}" / "steps.csv", workers=2)
    return job


def test_an_elastic_job_goes_on_when_a_host_dies(slurm: Slurm, tmp_path: Path) -> None:
    job = elastic_job(slurm, tmp_path)
    with slurm.dead("n2"):
        (tmp_path / "go").touch()
        state = slurm.wait(job, "COMPLETED", "FAILED", "NODE_FAIL", "PENDING")
    assert state == "COMPLETED", (tmp_path / "runs" / f"slurm-{job}.log").read_text()
    results = tmp_path / "runs" / f"slurm-{job}"
    assert [event["who"] for event in events(results) if event["name"] == "lost"] == ["worker-1"]
    assert (results / "model.safetensors").exists()
    assert left_of(job, slurm) == []


def test_an_elastic_job_whose_first_host_dies_is_queued_again(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(slurm.environment, "RAY_gcs_rpc_server_reconnect_timeout_s", "3")  # instead of a minute
    job = elastic_job(slurm, tmp_path)
    with slurm.dead("n1"):
        slurm.wait(job, "PENDING")
    slurm.ask("scancel", job)
    assert left_of(job, slurm) == []


def test_a_host_that_does_not_come_ends_the_job_with_the_reason(slurm: Slurm, tmp_path: Path) -> None:
    script = write_script(tmp_path, epochs=1)
    (tmp_path / "srun").write_text("#!/bin/bash\necho no host for you >&2\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{slurm.environment['PATH']}"
    broken = Slurm(slurm.home, {**slurm.environment, "PATH": path})
    job = broken.submit(script, "--nodes", "2", "--cores", "2", cwd=tmp_path)
    assert slurm.wait(job, "COMPLETED", "FAILED") == "FAILED"
    said = (tmp_path / "runs" / f"slurm-{job}.log").read_text()
    assert "Ray does not start on n2: no host for you" in said
    assert left_of(job, slurm) == []


def test_lists_of_hosts_are_as_slurm_reads_them(slurm: Slurm) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(hostlists())
    def compare(case: tuple[str, list[str]]) -> None:
        text, _ = case
        assert expand(text) == slurm.ask("scontrol", "show", "hostnames", text).split()

    compare()
