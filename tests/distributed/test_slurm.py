"""Jobs of a real SLURM: a controller and two of its daemons on this machine."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file

from paceline.checkpoint import FILE_NAME
from paceline.engines.scripting import read_script
from paceline.lab.study import Study
from paceline.scheduler import expand
from tests.conformance import local_engine
from tests.distributed.harness import events
from tests.distributed.slurm_cluster import WITHIN_S, Slurm, left_of, started
from tests.distributed.small_script import lines_by_rank, write_script
from tests.unit.test_scheduler import hostlists

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
MISSING = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)}: not installed (Debian's slurm-wlm and munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons are to run as root"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory, program_forks: str) -> Iterator[Slurm]:
    """Whose jobs have their workers forked; all else of them starts as ever."""
    with started(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def require_weights_of(here: Path, results: Path, *, epochs: int, strategy: str = "single", workers: int = 1) -> None:
    """The job's weights are those of the script in processes of this machine without SLURM and Ray; by default of one,
    which takes the batches of two workers together."""
    here.mkdir()
    script = read_script(here / write_script(here, epochs=epochs, batch_size=16 // workers), [])
    local_engine.run(script, strategy=strategy, workers=workers, out=here / "out")
    found, expected = (load_file(directory / "model.safetensors") for directory in (results, here / "out"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_job_on_two_hosts_trains_under_servers_and_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    script = write_script(tmp_path, epochs=5)
    job = slurm.submit(script, "--nodes", "2", "--cores", "2", "--strategy", "ps-bsp:servers=2", cwd=tmp_path)
    state = slurm.wait(job, "COMPLETED", "FAILED")
    said = (tmp_path / "runs" / f"slurm-{job}.log").read_text()
    assert state == "COMPLETED", said
    results = tmp_path / "runs" / f"slurm-{job}"
    require_weights_of(tmp_path / "alone", results, epochs=5)
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
    results = tmp_path / "runs" / f"slurm-{job}"
    assert len((results / "steps.csv").read_text().splitlines()) == 1 + 2 * 40 * 4  # no step twice, none left out
    require_weights_of(tmp_path / "alone", results, epochs=40)


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
    study = ["--strategies", "all-reduce,local-sgd:every=3", "--workers", "2", "--seeds", "1"]
    job = slurm.submit(script, "--compare", *study, "--nodes", "2", "--cores", "1", cwd=tmp_path)
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
    all_reduce, local_sgd = (results / "trials" / trial.id for trial in Study.open(results).spec.trials)
    require_weights_of(tmp_path / "alone", all_reduce, epochs=2)
    require_weights_of(tmp_path / "two", local_sgd, epochs=2, strategy="local-sgd:every=3", workers=2)
    assert left_of(job, slurm) == []


def wait_for_steps(path: Path, *, workers: int = 1) -> None:
    """Until so many workers have recorded ten steps each, or more."""
    give_up_s = time.monotonic() + WITHIN_S
    while sum(num >= 10 for num in lines_by_rank(path).values()) < workers:
        assert time.monotonic() < give_up_s
        time.sleep(0.2)


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
    require_weights_of(tmp_path / "alone", results, epochs=5)
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
