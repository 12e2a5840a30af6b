"""The ports that docs/security.md lists are those that runs open, and strangers get in at none of them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.namespaces import Network
from tests.distributed.harness import COLD, PACELINE, SCRIPTS, TRAIN, Command, is_training, num_steps, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
PAGE = Path(__file__).parents[2] / "docs" / "security.md"
NOBODY = 65534
TOKEN, CURVE, NOTHING = "Ray's token", "CURVE with the run's keys", "nothing but the network"
_LISTEN = "0A"
EVERY, OWN, LOOPBACK = "every address", "own address", "loopback"
_IF_INSTALLED = {("ray::DashboardAgent", OWN), ("ray.util.client.server", OWN), ("ray.util.client.server", LOOPBACK)}
TRAINING = ["--steps", "100000", "--step-s", "0.02"]  # longer than any test: it is ended

Socket = tuple[str, str]
"""Process and address, as the page names them."""


def table() -> dict[Socket, str]:
    """What protects each socket, as the page says."""
    rows = re.findall(r"^\| `(\S+)` \| (.+?) \| .+? \| (.+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {(process, address): protection for process, address, protection in rows}


def test_the_page_knows_three_ways_to_protect_a_port() -> None:
    assert len(table()) == 12
    assert set(table().values()) == {TOKEN, CURVE, NOTHING}


def name_of(process: psutil.Process) -> str:
    """As the page calls it."""
    command = process.cmdline()
    if command[0].startswith("ray::"):
        kind = re.split(r"[. ]", command[0])[0]
        return {"ray::WorkerActor": "worker", "ray::IDLE": "worker", "ray::ServerActor": "server"}.get(kind, kind)
    module = command[command.index("-m") + 1] if "-m" in command else Path(command[0]).name
    return "launcher" if PACELINE in command else module


def listening(pids: Sequence[int], *, own: str) -> dict[Socket, list[int]]:
    """The ports at which the processes listen."""
    words = {"0" * 8: EVERY, "0" * 32: EVERY}
    for address, word in {own: OWN, "127.0.0.1": LOOPBACK}.items():
        written = socket.inet_aton(address)[::-1].hex().upper()  # as the kernel writes it, on this processor
        words |= {written: word, f"{'0' * 16}FFFF0000{written}": word}
    found: dict[Socket, list[int]] = {}
    for pid in pids:
        with suppress(psutil.Error, OSError):
            name = name_of(psutil.Process(pid))
            opened = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
            # Not through psutil, which looks at the network namespace of whoever asks.
            for table_of in ("tcp", "tcp6"):
                for line in Path(f"/proc/{pid}/net/{table_of}").read_text().splitlines()[1:]:
                    row = line.split()
                    if row[3] == _LISTEN and f"socket:[{row[9]}]" in opened:
                        address, port = row[1].split(":")
                        found.setdefault((name, words.get(address, address)), []).append(int(port, 16))
    return found


def told(ports: Sequence[tuple[str, int]], *, paths: Sequence[str] = (), user: int | None = None) -> list[str]:
    """The command of a stranger who tries these."""
    given = {"ports": ports, "paths": list(paths), "user": user}
    return [sys.executable, str(SCRIPTS / "stranger.py"), json.dumps(given)]


def require_that_nobody_got_in(said: Mapping[str, Any], protections: Mapping[str, str]) -> None:
    assert said["opened"] == []
    assert said["answers"].keys() == protections.keys()
    for port, protection in protections.items():
        answers = said["answers"][port]
        assert "ANSWERED" not in answers, (port, protection, answers)
        assert ("UNAUTHENTICATED" in answers) == (protection == TOKEN), (port, protection, answers)


def private_paths(pids: Sequence[int]) -> list[str]:
    """What belongs to the processes of a run alone."""
    paths = [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "fd", "mem")]
    commands = " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)
    (directory,) = set(re.findall(r"/tmp/paceline-ray-\w+", commands))
    return [*paths, directory, f"{directory}/ray", f"{directory}/ray/session_latest/sockets"]


def require_that_it_goes_on(out: Path) -> None:
    """The run trains, and has heard nothing that it had to refuse."""
    before = num_steps(out)
    assert wait_until(lambda: num_steps(out) > before + 20)
    assert '"refused"' not in (out / "events.jsonl").read_text()


def own_address() -> str:
    """The one by which Ray will know this machine."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


@pytest.mark.slow
def test_a_run_on_one_host(start: Callable[..., Command], tmp_path: Path) -> None:
    out = tmp_path / "out"
    strategy = ["--strategy", "ps-bsp", "--workers", 2, "--option", "servers=1"]
    command = start("run", TRAIN, *strategy, "--out", out, "--", *TRAINING, **COLD)
    assert wait_until(lambda: is_training(out)), command.wait(timeout_s=1)
    launcher = psutil.Process(command.process.pid)
    pids = [process.pid for process in (launcher, *launcher.children(recursive=True))]
    found = listening(pids, own=own_address())
    always = set(table()) - _IF_INSTALLED - {("worker", OWN)}  # there is no other host
    assert always <= found.keys() <= set(table()) - {("worker", OWN)}

    ports = [(own_address(), port) for ports in found.values() for port in ports]
    protections = {f"{own_address()}:{port}": table()[place] for place, ports in found.items() for port in ports}
    users = [None, NOBODY] if os.geteuid() == 0 else [None]
    for user in users:
        asked = told(ports, paths=private_paths(pids) if user is not None else (), user=user)
        done = subprocess.run(asked, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        require_that_nobody_got_in(json.loads(done.stdout), protections)
    require_that_it_goes_on(out)
    command.interrupt()
    assert "saved at iteration" in command.wait()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_on_two_hosts_with_a_stranger_on_their_network(hosts: Network, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, second, outside = hosts.hosts
    address = replace(hosts, hosts=(first, second), programs=Path(PACELINE).parent).start_ray()
    command = [PACELINE, "run", str(TRAIN), "--strategy", "ps-bsp", "--workers", "2", "--option", "servers=2"]
    command += ["--start-deadline", "600"]
    launcher = hosts.start(first, [*command, "--address", address, "--out", str(out), "--", *TRAINING])
    assert wait_until(lambda: is_training(out) or launcher.poll() is not None, within_s=600)
    assert launcher.poll() is None, launcher.communicate()
    ports, protections = [], {}
    seen: set[Socket] = set()
    for host in (first, second):
        listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
        for place, found in listening([int(pid) for pid in listed.stdout.split()], own=host.address).items():
            seen.add(place)
            if place[1] == LOOPBACK:
                continue  # where nobody from outside can knock
            ports += [(host.address, port) for port in found]
            protections |= {f"{host.address}:{port}": table()[place] for port in found}
    assert set(table()) - _IF_INSTALLED <= seen <= set(table())
    # Strangers know no token: their environment is not that of the hosts. One is another user of the first.
    strangers = replace(hosts, environment={"RAY_AUTH_TOKEN": "", "RAY_AUTH_MODE": ""})
    knocking = {host: told(ports, user=user) for host, user in ((outside, None), (first, NOBODY))}
    for said in strangers.run_all(knocking, timeout_s=400):
        require_that_nobody_got_in(json.loads(said), protections)
    require_that_it_goes_on(out)
    launcher.terminate()
    launcher.communicate(timeout=600)
