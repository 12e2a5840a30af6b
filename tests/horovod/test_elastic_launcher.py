"""Elastic jobs by the launcher's command line, in processes of its own."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline.horovod
from paceline.errors import RunFailed, UsageError
from paceline.horovod import processes
from paceline.running.result import Result

SCRIPT = """
import json, os, sys, time
import torch
import horovod.torch as hvd

hvd.init()
first, folder = hvd.rank(), sys.argv[1]
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[], left=10)


@hvd.elastic.run
def train(state):
    state.sizes = [*state.sizes, hvd.size()]
    while state.left:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.step += 1
        state.left -= len(state.sizes) >= int(sys.argv[2])
        with open(f"{folder}/said", "a") as file:
            file.write(json.dumps([os.getpid(), first, state.step, hvd.rank(), hvd.size(),
                                   os.environ["HOROVOD_HOSTNAME"]]) + "\\n")
        if first == 0 and state.step % 5 == 2 and os.path.exists(f"{folder}/strike"):
            os.kill(os.getpid(), 9)
        if state.step % 5 == 0:
            state.commit()
        time.sleep(0.02)


train(state)
print("sizes", state.sizes, flush=True)
"""


class Job:
    """One command of the launcher's, and what its script has written down."""

    def __init__(self, folder: Path, *options: str, memberships: int) -> None:
        (folder / "train.py").write_text(SCRIPT)
        self.said_path = folder / "said"
        self.said_path.touch()
        script = [str(folder / "train.py"), str(folder), str(memberships)]
        command = ["paceline", "horovodrun", *options, "python", *script]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=folder
        )

    def said(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.said_path.read_text().splitlines(keepends=True) if line[-1] == "\n"]

    def wait_until(self, is_so: Callable[[list[list[Any]]], Any]) -> list[list[Any]]:
        until_s = time.monotonic() + 300
        while not is_so(said := self.said()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until_s, said[-3:]
            time.sleep(0.02)
        return said

    def end(self) -> tuple[str, str]:
        out, err = self.process.communicate(timeout=600)
        return out, err


def discovery(folder: Path, *hosts: str) -> str:
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o755)
    show(folder, *hosts)
    return str(script)


def show(folder: Path, *hosts: str) -> None:
    (folder / "new").write_text("\n".join(hosts) + "\n")
    (folder / "new").rename(folder / "hosts")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_job_follows_its_hosts_and_outlives_a_killed_worker(tmp_path: Path) -> None:
    script = discovery(tmp_path, "localhost:2")
    options = ("-np", "2", "--min-np", "1", "--host-discovery-script", script, "--slots-per-host", "1")
    job = Job(tmp_path, *options, memberships=3)
    job.wait_until(lambda said: len(said) > 20)
    show(tmp_path, "localhost:2", "127.0.0.1")  # whose slots the option says
    job.wait_until(lambda said: sum(each[4] == 3 for each in said) > 30)
    (tmp_path / "strike").touch()  # the first rank, two steps behind a commit
    out, err = job.end()
    assert job.process.returncode == 0, err
    assert out == "[0]<stdout>:sizes [2, 3, 1]\n"
    assert "\nthe job goes on with 3 workers, of whom 1 is new\n" in f"\n{err}"
    assert "rank 0 on localhost was ended by signal 9; the job goes on with 1 worker\n" in err
    survivor = [each for each in job.said() if each[5] == "127.0.0.1"]
    assert survivor[-1][3:5] == [0, 1]
    steps = [each[2] for each in survivor]
    back = [(one, other) for one, other in itertools.pairwise(steps) if other != one + 1]
    assert len(back) == 1
    assert back[0][1] % 5 == 1  # behind a commit
    check_records(tmp_path, survivor)


def check_records(folder: Path, said: list[list[Any]]) -> None:
    """The newcomer's steps are iterations of the job, on its clock; those that were lost are made again."""
    (directory,) = (folder / "runs").iterdir()
    by_worker = {number: [each for each in Result(directory).steps if each.worker == number] for number in range(3)}
    assert by_worker[0][0].iteration == by_worker[1][0].iteration == 1
    newcomer = by_worker[2]
    assert [each.iteration for each in newcomer] == [step for _, _, step, *_ in said]
    assert newcomer[0].time_s > by_worker[0][9].time_s
    assert [each.step for each in newcomer] == list(range(1, len(said) + 1))
    grown, shrunk = [event for event in Result(directory).events if event.name == "reformed"]
    assert (grown.details["ranks"], grown.details["joined"], shrunk.details["ranks"]) == ([0, 1, 2], [2], [2])
    assert 20 <= grown.iteration < shrunk.iteration
    assert newcomer[0].iteration == grown.iteration + 1
    assert 0.0 < grown.time_s < shrunk.time_s


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_host_gets_a_worker_again_once_its_cooldown_is_over(tmp_path: Path) -> None:
    options = ("-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1", "--blacklist-cooldown-range", "2", "8")
    job = Job(tmp_path, *options, memberships=3)
    said = job.wait_until(lambda said: len(said) > 20)
    os.kill(next(each[0] for each in said if each[5] == "127.0.0.1"), signal.SIGKILL)
    out, err = job.end()
    assert job.process.returncode == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:sizes [2, 1, 2]" for rank in range(2)]
    assert len({each[0] for each in job.said() if each[5] == "127.0.0.1"}) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_is_left_when_the_launcher_ends(tmp_path: Path, ending: signal.Signals) -> None:
    job = Job(tmp_path, "-np", "2", "--min-np", "2", "-H", "localhost:2", memberships=9)
    pids = {each[0] for each in job.wait_until(lambda said: len({each[0] for each in said}) == 2)}
    job.process.send_signal(ending)
    _, err = job.end()
    assert job.process.returncode != 0
    assert "Traceback" not in err
    until_s = time.monotonic() + 300
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_hosts_that_cannot_be_told_end_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = discovery(tmp_path, "localhost:many")
    with pytest.raises(UsageError, match=r"'localhost:many' is not of the form host:slots"):
        paceline.horovod.run(print, host_discovery_script=script)
    (tmp_path / "hosts").unlink()
    with pytest.raises(RunFailed, match=r"--host-discovery-script .* ended with status 1: cat: .*/hosts"):
        paceline.horovod.run(print, host_discovery_script=script)
    with pytest.raises(RunFailed, match=r"cannot be run: .*No such file"):
        paceline.horovod.run(print, host_discovery_script=f"{tmp_path}/nothing")


def test_hosts_that_hang_end_the_job_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hanging = tmp_path / "ssh"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("PACELINE_SSH", str(hanging))
    big = bytes(1_000_000)  # more than a pipe takes, of which nobody reads
    with pytest.raises(RunFailed, match=r"first a new worker on far[12] was ended by signal 9"):
        paceline.horovod.run(lambda: len(big), np=2, min_num_proc=1, hosts="far1:1,far2:1", start_timeout=0.3)
    assert "did not start a worker within 0.3 s" in capfd.readouterr().err


def test_what_run_refuses() -> None:
    for given, said in (
        ({"use_mpi": True}, "use_mpi cannot be had"),
        ({"executable": "python2"}, "executable cannot be had"),
        ({"hosts": "a:1", "hostfile": "b"}, "hosts or hostfile"),
        ({"reset_limit": 1}, "--reset-limit is for elastic jobs"),
        ({"np": 3, "hosts": "a:1"}, "-np 3 is more than the 1 slots"),
    ):
        with pytest.raises(UsageError, match=said):
            paceline.horovod.run(print, **given)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_function_on_every_rank_returns_what_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    worker = [shutil.which("python"), "-u", "-m", "paceline.horovod.remote"]
    monkeypatch.setattr(processes, "_worker", lambda: worker)
    gathered = [(0, "a word"), (1, "a word")]
    results = paceline.horovod.run(_gather, ("a",), {"rest": " word"}, np=2)
    assert [(result, type(big), len(big)) for result, big in results] == [(gathered, bytes, 10_000_000)] * 2
    elastic = paceline.horovod.run(_gather, ("a",), {"rest": " word"}, num_proc=2, min_num_proc=1)
    assert [result for result, _ in elastic] == [gathered] * 2
    assert not (tmp_path / "runs").exists()  # there were no steps
    assert paceline.horovod.run(_step, np=2) == [None] * 2
    (directory,) = (tmp_path / "runs").iterdir()
    assert [(each.worker, each.iteration) for each in sorted(Result(directory).steps, key=str)] == [(0, 1), (1, 1)]
    assert Result(directory).manifest["program"] == "_step"


def _gather(word: str, rest: str) -> tuple[Any, bytes]:
    import horovod.torch as hvd

    hvd.init()
    return hvd.allgather_object((hvd.rank(), word + rest)), bytes(10_000_000)


def _step() -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
