"""Workers on other hosts die, whole hosts die, and the network parts: the launcher's side goes on, with the undisturbed
run's model.

TensorFlow tests a preempted host as a worker that is killed, and torchft a replica group that is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.namespaces import SWITCH, Host, Network
from tests.distributed.harness import PACELINE, SCRIPTS, pids, wait_until
from tests.distributed.test_elastic import of, require_each_sample_once, require_same_model, undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


SCRIPT = str(SCRIPTS / "survivors.py")
SAMPLES = 200
DEADLINE_S = 3.0


def start(
    network: Network, address: str, directory: Path, *arguments: object, workers: int
) -> tuple[subprocess.Popen[str], Path]:
    log, out = directory / "log", directory / "out"
    log.mkdir(parents=True)
    settings = ["--workers", str(workers), "--address", address, "--elastic", f"1:{workers}", "--out", str(out)]
    given = [*map(str, arguments), "--samples", str(SAMPLES), "--step-s", "0.1", "--log", str(log)]
    return network.start(network.hosts[0], [PACELINE, "run", SCRIPT, *settings, "--", *given]), out


def finish(process: subprocess.Popen[str], out: Path, *, workers: int) -> None:
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, output[-3000:] + errors[-3000:]
    require_each_sample_once(out, samples=SAMPLES)
    require_same_model(out, undisturbed(workers=workers, samples=SAMPLES))


def wait_for(process: subprocess.Popen[str], out: Path, *, num_steps: int) -> None:
    """Until the first worker has made so many."""
    log, until_s = out.parent / "log" / "rank-0", time.monotonic() + 60
    while not log.exists() or len(log.read_text().splitlines()) < num_steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.05)


def pids_on(host: Host) -> set[int]:
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
    return set(map(int, listed.stdout.split()))


def host_of(network: Network, pid: int) -> Host:
    return next(host for host in network.hosts if pid in pids_on(host))


def require_end(pid: int, host: Host) -> None:
    """It ends by itself, by the deadline."""
    assert pid in pids_on(host)
    began_s = time.monotonic()
    assert wait_until(lambda: pid not in pids_on(host), within_s=10)
    took_s = time.monotonic() - began_s
    print(f"process {pid} ended {took_s:.2f} s after its host was cut off")
    assert took_s < DEADLINE_S + 1


def set_link(network: Network, host: Host, state: str) -> None:
    port = f"port{network.hosts.index(host) + 1}"
    subprocess.run(["ip", "-n", SWITCH, "link", "set", port, state], check=True)


def test_workers_and_hosts_die_and_are_cut_off(hosts: Network, tmp_path: Path) -> None:
    """A worker in mid-step, beside others on its host; a host with all that runs there; and a host that is cut off."""
    address = hosts.start_ray()
    process, out = start(hosts, address, tmp_path / "deaths", "--fail", "3:4:kill", workers=5)
    wait_for(process, out, num_steps=9)
    ended = host_of(hosts, pids(out)["worker-4"])
    for pid in pids_on(ended):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    finish(process, out, workers=5)
    assert [event["who"] for event in of(out, "lost")] == ["worker-3", "worker-4"]
    assert [event["details"]["ranks"] for event in of(out, "reformed")] == [[0, 1, 2, 4], [0, 1, 2]]

    process, out = start(hosts, address, tmp_path / "cut", workers=2)
    wait_for(process, out, num_steps=9)
    other = pids(out)["worker-1"]
    cut_off = host_of(hosts, other)
    set_link(hosts, cut_off, "down")
    require_end(other, cut_off)
    finish(process, out, workers=2)
    (lost,) = of(out, "lost")
    assert (lost["who"], "it was silent for" in lost["details"]["why"]) == ("worker-1", True)
    (reformed,) = of(out, "reformed")
    assert reformed["details"]["took_s"] < 1


def test_nobody_goes_on_alone_on_the_other_side(hosts: Network, tmp_path: Path) -> None:
    """It needs nobody else for its steps, and the launcher's run is over: there are never two."""
    process, out = start(hosts, hosts.start_ray(), tmp_path / "alone", "--fail", "0:4:kill", workers=2)
    other = pids(out)["worker-1"] if wait_until(lambda: of(out, "reformed"), within_s=60) else 0
    alone = host_of(hosts, other)
    set_link(hosts, alone, "down")
    require_end(other, alone)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "0 workers are left" in output + errors
