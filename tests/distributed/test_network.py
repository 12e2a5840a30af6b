"""Of two networks between two hosts, runs take the one that docs/network.md says, and listen there alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces import Network
from tests.distributed.harness import SCRIPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SCRIPT = str(SCRIPTS / "interfaces.py")
ADDRESSES = {"eth0": ("10.77.0.1", "10.77.0.2"), "ib0": ("10.78.0.1", "10.78.0.2")}
MUCH, LITTLE = 4e6, 1e6  # bytes; the model has 1 MB, and 8 steps or more are made


@pytest.fixture
def two_ways(hosts: Network) -> Network:
    """Two hosts with `eth0`, and a cable between them whose ends are called as those of InfiniBand are."""
    first, second, _ = hosts.hosts
    ends = ["netns", first.name, "type", "veth", "peer", "name", "ib0", "netns", second.name]
    subprocess.run(["ip", "link", "add", "ib0", *ends], check=True)
    for host, address in zip((first, second), ADDRESSES["ib0"], strict=True):
        subprocess.run(["ip", "-n", host.name, "address", "add", f"{address}/24", "dev", "ib0"], check=True)
        subprocess.run(["ip", "-n", host.name, "link", "set", "ib0", "up"], check=True)
    return replace(hosts, hosts=(first, second))


def without_interface(network: Network, **more: str) -> Network:
    kept: Mapping[str, str] = {k: v for k, v in network.environment.items() if k != "GLOO_SOCKET_IFNAME"}
    return replace(network, environment={**kept, **more})


def said_by(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(2)]


def require_way(said: list[dict[str, Any]], chosen: str, *, listens: bool) -> None:
    (other,) = set(ADDRESSES) - {chosen}
    assert sum(each["sent"][chosen] for each in said) > MUCH, said
    assert sum(each["sent"][other] for each in said) < LITTLE, said
    if listens:
        assert [each["listens"] for each in said] == [[address] for address in ADDRESSES[chosen]]


@pytest.mark.parametrize(
    ("variables", "master", "chosen"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "eth0", "ib0"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "ib0", "eth0"),
        ({}, "ib0", "ib0"),
    ],
    ids=["ib0 is named", "eth0 is named", "the way to the first host"],
)
def test_torchrun(two_ways: Network, tmp_path: Path, variables: dict[str, str], master: str, chosen: str) -> None:
    python = str(two_ways.programs / "python")
    network = without_interface(two_ways, PYTHON_EXEC=python, **variables)
    meeting = ["--master-addr", ADDRESSES[master][0], "--master-port", "29511"]
    script = [SCRIPT, str(tmp_path)]
    torchrun = [python, "-m", "torch.distributed.run"]
    commands = {
        host: [*torchrun, "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number), *meeting, *script]
        for number, host in enumerate(network.hosts)
    }
    network.run_all(commands, timeout_s=600)
    require_way(said_by(tmp_path), chosen, listens=True)


@pytest.mark.ray
@pytest.mark.parametrize("chosen", ["ib0", "eth0"])
def test_a_run_takes_the_address_that_ray_was_started_with(two_ways: Network, tmp_path: Path, chosen: str) -> None:
    """Whatever GLOO_SOCKET_IFNAME says, under all-reduce over gloo and under servers over ZeroMQ."""
    (other,) = set(ADDRESSES) - {chosen}
    places = zip(two_ways.hosts, ADDRESSES[chosen], strict=True)
    hosts = tuple(replace(host, address=address) for host, address in places)
    network = replace(without_interface(two_ways, GLOO_SOCKET_IFNAME=other), hosts=hosts)
    address = network.start_ray()
    for strategy in ("all-reduce", "ps-bsp:servers=2"):
        directory = tmp_path / strategy.partition(":")[0]
        directory.mkdir()
        settings = ["--strategy", strategy, "--workers", "2", "--address", address, "--out", str(directory / "out")]
        network.run(
            hosts[0],
            [str(network.programs / "paceline"), "run", SCRIPT, *settings, "--", str(directory)],
            timeout_s=600,
        )
        require_way(said_by(directory), chosen, listens=strategy == "all-reduce")
