"""Jobs of SageMaker, simulated: two hosts of their own network, on each of which the same command is started."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.namespaces import Network
from tests.distributed.small_script import write_script

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1800)]
NAMES = ("algo-1", "algo-2")


@pytest.fixture
def job(hosts: Network) -> Iterator[Network]:
    """Two of the hosts, which know each other by SageMaker's names; `ip netns exec` has their files of hosts."""
    chosen = hosts.hosts[:2]
    lines = [f"{host.address} {name}" for host, name in zip(chosen, NAMES, strict=True)]
    places = [Path("/etc/netns", host.name) for host in chosen]
    try:
        for place in places:
            place.mkdir(parents=True)
            (place / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        yield replace(hosts, hosts=chosen)
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def started(job: Network, directory: Path, *options: str, token: str) -> list[subprocess.Popen[str]]:
    """The second host comes first."""
    script = write_script(directory, epochs=2)
    settings = {"SM_FRAMEWORK_PARAMS": '{"sagemaker_parameter_server_enabled": true}', "SM_NUM_CPUS": "1"}
    name = {"TRAINING_JOB_NAME": f"job-{secrets.token_hex(4)}", "RAY_AUTH_TOKEN": token}
    processes = []
    for number in (1, 0):
        told = json.dumps({"current_host": NAMES[number], "hosts": NAMES, "network_interface_name": "eth0"})
        here = replace(job, environment={**job.environment, **settings, **name, "SM_RESOURCE_CONFIG": told})
        command = [
            str(job.programs / "paceline"),
            "run",
            str(directory / script),
            "--out",
            str(directory / "results"),
            *options,
        ]
        processes.append(here.start(job.hosts[number], command))
    return processes[::-1]


def said_by(process: subprocess.Popen[str]) -> str:
    said, errors = process.communicate(timeout=600)
    return said + errors


def test_each_host_starts_the_same_and_the_first_one_trains(job: Network, tmp_path: Path) -> None:
    first, second = started(job, tmp_path, token=secrets.token_hex(32))
    said = said_by(first)
    assert first.returncode == 0, said
    assert "SageMaker's setting parameter_server: --strategy ps-asp:servers=2 --workers 2" in said
    lent = said_by(second)
    assert second.returncode == 0, lent
    assert "algo-2 works for algo-1, and ends with its run" in lent
    manifest = json.loads((tmp_path / "results" / "manifest.json").read_text())
    assert manifest["num_workers"] == 2
    hosts = [line for line in (tmp_path / "results" / "events.jsonl").read_text().splitlines() if '"started"' in line]
    assert json.loads(hosts[0])["details"]["hosts"] == 2


def test_hosts_without_a_secret_do_not_meet(job: Network, tmp_path: Path) -> None:
    for process in started(job, tmp_path, token=""):
        said = said_by(process)
        assert process.returncode == 2, said
        assert "RAY_AUTH_TOKEN" in said
