"""Hosts and slots as PBS and LSF tell them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.engines.ray import remote_start
from paceline.errors import UsageError
from paceline.scheduler import from_environment

HOSTS = st.dictionaries(st.from_regex(r"[a-z0-9][a-z0-9.-]{0,8}", fullmatch=True), st.integers(1, 9), min_size=1)


def pbs(file: Path) -> dict[str, str]:
    return {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(file)}


def lsf(file: Path) -> dict[str, str]:
    return {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": str(file)}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HOSTS, st.randoms(use_true_random=False))
def test_slots_are_read_as_written(tmp_path: Path, hosts: dict[str, int], random: object) -> None:
    slots = [host for host, number in hosts.items() for _ in range(number)]
    random.shuffle(slots)  # type: ignore[attr-defined]  # a job's lines need not be in groups
    file = tmp_path / "hosts"
    file.write_text("\n".join(slots) + "\n\n")
    pairs = " ".join(f"{host} {number}" for host, number in hosts.items())
    of_pbs, of_lsf = from_environment(pbs(file)), from_environment(lsf(file))
    in_pairs = from_environment({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": pairs})
    assert of_pbs is not None
    assert of_lsf is not None
    assert in_pairs is not None
    for read in (of_pbs, of_lsf, in_pairs):
        assert dict(zip(read.hosts, read.cores, strict=True)) == hosts
    assert of_pbs.hosts == of_lsf.hosts == tuple(dict.fromkeys(slots))
    assert of_pbs.prefixes is not None
    assert [slots[int(prefix[2])] for prefix in of_pbs.prefixes] == list(of_pbs.hosts)
    assert of_lsf.prefixes == tuple(("blaunch", host) for host in of_lsf.hosts)


@pytest.mark.parametrize("task", [{"PBS_TASKNUM": "2"}, {"LSF_PM_TASKID": "1"}])
def test_a_task_of_a_job_starts_no_cluster(tmp_path: Path, task: Mapping[str, str]) -> None:
    of = pbs if "PBS_TASKNUM" in task else lsf
    assert from_environment({**of(tmp_path / "missing"), **task}) is None


def test_the_cluster_is_started_on_the_first_host(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("n1.site\nn2.site\n")
    for environment in (pbs(file), lsf(file)):
        assert from_environment(environment, "N1") is not None
        with pytest.raises(UsageError, match=r"first host of job 7.*this is 'n2'.*--address"):
            from_environment(environment, "n2")
    file.write_text("n1\nn1\n")
    assert from_environment(pbs(file), "container") is not None  # one host needs no cluster


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"\n \n", "names no host"),
        (b"n1\n-oProxyCommand=x\n", "no host's name"),
        (b"n1 n2\n", "no host's name"),
        (b"\xff\xfe\n", "no host's name"),
        (b"\n" * (16 * 1024 * 1024 + 1), "larger than 16 MiB"),
    ],
    ids=["missing", "empty", "dash", "two", "bytes", "large"],
)
def test_files_that_are_no_lists_are_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "hosts"
    if content is not None:
        file.write_bytes(content)
    for environment, name in ((pbs(file), "PBS_NODEFILE"), (lsf(file), "LSB_DJOB_HOSTFILE")):
        with pytest.raises(UsageError, match=rf"{name} '.*/hosts' .*{said}.*--address"):
            from_environment(environment)


@pytest.mark.parametrize("text", [" ", "a", "a 4 b", "a 0", "a -1", "a many", "a 99999999", "-x 4"])
def test_pairs_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"LSB_MCPU_HOSTS.*--address"):
        from_environment({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": text})


def test_a_command_gets_the_environment_and_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "a secret\nof two lines")
    monkeypatch.setenv("PBS_TASKNUM", "1")
    asked = "import json, os; print(json.dumps([os.getcwd(), os.environ['TOKEN'], os.environ['PBS_TASKNUM']]))"
    with remote_start.shared_environment() as file:
        assert file.stat().st_mode & 0o777 == 0o600
        program = [sys.executable, "-I", remote_start.__file__, str(file), sys.executable, "-c", asked]
        task = {"PATH": os.defpath, "PBS_TASKNUM": "2"}
        done = subprocess.run(program, env=task, cwd="/", capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [str(tmp_path), "a secret\nof two lines", "2"]
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_launcher_has_left_goes_and_what_another_job_uses_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    makes = "import os, signal; from paceline.engines.ray import remote_start as r\n"
    makes += "with r.shared_environment(): os.kill(os.getpid(), signal.SIGKILL)"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", makes], cwd=tmp_path, check=False)
    old, young = tmp_path.iterdir()
    os.utime(old, (time.time() - 7200,) * 2)
    with remote_start.shared_environment() as own:
        assert sorted(tmp_path.iterdir()) == sorted([young, own])
    assert list(tmp_path.iterdir()) == [young]
