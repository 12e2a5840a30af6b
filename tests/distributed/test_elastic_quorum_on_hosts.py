"""Rounds of a quorum on several hosts: workers die, join and are interrupted, and hosts die. Each change is in one
round on each server, and each sample in one of them, an epoch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.namespaces import Host, Network
from tests.distributed.harness import pids, wait_until
from tests.distributed.test_elastic import of
from tests.distributed.test_elastic_async_diloco import require_counted, strategy
from tests.distributed.test_elastic_hosts import (
    PATIENCE_S,
    end,
    go_on,
    host_of,
    pids_on,
    said,
    scale,
    start,
    three_hosts,
)
from tests.distributed.test_elastic_servers import updates
from tests.distributed.test_joining import held, iterations_of

__all__ = ["three_hosts"]
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]
ALONE = strategy(1)
EPOCHS = 6


def begin(network: Network, address: str, directory: Path, *given: object, workers: int = 3, **settings: object):
    options = ["--strategy", ALONE, "--checkpoint-every", "4", *settings.pop("options", ())]
    arguments = ["--tally", "--epochs", EPOCHS, *given]
    rest = {"workers": workers, "samples": 96, "step_s": 0.02, "options": options, **settings}
    return start(network, address, directory, *arguments, **rest)


def kill_all_on(host: Host) -> None:
    for pid in pids_on(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def come_to(process: subprocess.Popen[str], out: Path, iteration: int) -> None:
    is_there = wait_until(lambda: max(iterations_of(out), default=0) >= iteration, within_s=PATIENCE_S)
    assert is_there, said(process)


def workers_and_a_host_die(network: Network, address: str, directory: Path) -> None:
    """One of three workers is killed; another one comes, to a host with a server; then the host without one dies."""
    process, out = begin(network, address, directory, *held(4, 16), "--fail", "1:5:kill")
    come_to(process, out, 3)
    assert wait_until(lambda: of(out, "let_go"), within_s=PATIENCE_S), said(process)
    assert "2 workers train; 1 more start" in scale(network, out, 3)
    go_on(process, out, held_at=(4,))
    assert wait_until(lambda: of(out, "let_in"), within_s=PATIENCE_S), said(process)
    come_to(process, out, 16)
    struck = host_of(network, pids(out)["worker-2"])
    assert not {pids(out)[name] for name in ("server-0", "server-1")} & pids_on(struck)
    assert [event["details"]["address"] for event in of(out, "starting")] != [struck.address]
    kill_all_on(struck)
    assert wait_until(lambda: len(of(out, "let_go")) == 2, within_s=PATIENCE_S), said(process)
    (out.parent / "log" / "go-16").touch()
    end(process)
    assert [event["who"] for event in of(out, "lost")] == ["worker-1", "worker-2"]
    assert {worker for _, worker, _ in updates(out)} == {0, 1, 2, 3}
    require_counted(out, epochs=EPOCHS)


def one_is_interrupted_and_goes_on(network: Network, address: str, directory: Path) -> None:
    """Ctrl-C has three save what they have. Two go on from there; of them one dies."""
    process, out = begin(network, address, directory / "first", *held(9))
    come_to(process, out, 8)
    process.send_signal(signal.SIGINT)
    (out.parent / "log" / "go-9").touch()
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, output + errors
    given = ["--fail", "0:8:kill"]
    process, again = begin(
        network, address, directory / "again", *given, workers=2, options=["--resume", str(out)], elastic="1:3"
    )
    end(process)
    assert [event["who"] for event in of(again, "lost")] == ["worker-0"]
    require_counted(again, epochs=EPOCHS, before=out)


def a_servers_host_dies(network: Network, address: str, directory: Path) -> None:
    """The run ends at once and names the server; what was saved goes on on the hosts that are left."""
    process, out = begin(network, address, directory / "first", *held(12))
    come_to(process, out, 12)
    servers = {name: host_of(network, pid) for name, pid in pids(out).items() if name.startswith("server")}
    name, struck = next((name, host) for name, host in servers.items() if host != network.hosts[0])
    kill_all_on(struck)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"{name.replace('-', ' ')} (process {pids(out)[name]}) died" in output + errors
    process, again = begin(
        network, address, directory / "again", workers=1, options=["--resume", str(out)], elastic="1:3"
    )
    end(process)
    require_counted(again, epochs=EPOCHS, before=out)


def test_rounds_of_a_quorum_outlive_workers_and_a_host(three_hosts: Network, tmp_path: Path) -> None:
    workers_and_a_host_die(three_hosts, three_hosts.start_ray(), tmp_path / "dying")


def test_rounds_of_a_quorum_go_on_elsewhere(three_hosts: Network, tmp_path: Path) -> None:
    address = three_hosts.start_ray()
    one_is_interrupted_and_goes_on(three_hosts, address, tmp_path / "interrupted")
    a_servers_host_dies(three_hosts, address, tmp_path / "struck")
