"""Groups of the torch.distributed backend whose ranks are on several hosts, here pretended, and what hosts are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm import connecting, hosts
from paceline.comm.hierarchical.collective import HierarchicalCollective
from paceline.comm.process_group.collective import TorchCollective
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.errors import UsageError
from tests.unit.torch_backend_world import TorchWorld

LARGE = 200_000


@pytest.fixture(scope="module")
def quartet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchWorld]:
    with TorchWorld(4, tmp_path_factory.mktemp("quartet")) as world:
        yield world


def pretend(rank: int, hosts: list[str]) -> tuple[str, str, list[Any]]:
    """What carries a group whose ranks are on `hosts`, and what comes out of its operations."""
    identity = connecting.host_identity
    connecting.host_identity = lambda: hosts[rank]
    try:
        group = dist.new_group(backend="paceline")
    finally:
        connecting.host_identity = identity
    results: list[Any] = []
    for length in (5, LARGE):
        tensor = torch.full((length,), float(rank))
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        results.append(tensor[-1].item())
    outputs = [torch.empty(2) for _ in range(4)]
    dist.all_gather(outputs, torch.full((2,), float(rank)), group=group)
    results.append([output[0].item() for output in outputs])
    incoming = torch.empty(LARGE)
    works = [
        dist.isend(torch.full((LARGE,), float(rank)), (rank + 1) % 4, group, tag=1),
        dist.irecv(incoming, (rank - 1) % 4, group, tag=1),
    ]
    for work in works:
        work.wait()
    results.append(incoming[-1].item())
    dist.barrier(group)
    names = [type(carrier).__name__ for carrier in (group._collective, group._message_carrier)]
    dist.destroy_process_group(group)
    return names[0], names[1], results


@pytest.mark.parametrize(
    ("hosts", "collective", "carrier"),
    [
        ("aaaa", SharedMemoryCollective, SharedMemoryCollective),
        ("abcd", TorchCollective, TorchCollective),
        ("abab", HierarchicalCollective, TorchCollective),
        ("abbb", HierarchicalCollective, TorchCollective),
    ],
)
def test_what_carries_a_group(quartet: TorchWorld, hosts: str, collective: type, carrier: type) -> None:
    for rank, (name, carrier_name, results) in enumerate(quartet.run(pretend, list(hosts))):
        assert (name, carrier_name) == (collective.__name__, carrier.__name__)
        assert results == [6.0, 6.0, [0.0, 1.0, 2.0, 3.0], (rank - 1) % 4]


def with_a_stale_interface(rank: int) -> float:
    """An all-reduce among ranks of one host, where GLOO_SOCKET_IFNAME names an interface that is not there."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
        group = dist.new_group(backend="paceline")
    tensor = torch.full((1,), float(rank))
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    return tensor.item()


def test_one_host_needs_no_interface(quartet: TorchWorld) -> None:
    assert quartet.run(with_a_stale_interface) == [6.0] * 4


def test_a_host_is_the_same_in_all_its_processes(quartet: TorchWorld) -> None:
    assert set(quartet.run(identify)) == {hosts.host_identity()}


def identify(_: int) -> str:
    return hosts.host_identity()


def test_the_interface_of_gloo_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert hosts.own_ip_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    with pytest.raises(UsageError, match=r"nonesuch0.*there are .*lo"):
        hosts.own_ip_address()


def test_nccl_takes_the_interface_of_the_address_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with hosts.nccl_interface("127.0.0.1"):
        assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    with hosts.nccl_interface("127.0.0.1"):
        assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_the_address_is_not_the_loopbacks_while_another_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    ways = {"master": "127.0.1.1", hosts._ELSEWHERE: "10.1.2.3"}
    monkeypatch.setattr(hosts, "_source_of_packets_to", ways.get)
    monkeypatch.setenv("MASTER_ADDR", "master")
    assert hosts.own_ip_address() == "10.1.2.3"
    ways["master"] = "10.9.9.9"
    assert hosts.own_ip_address() == "10.9.9.9"
    monkeypatch.setattr(hosts, "_source_of_packets_to", lambda host: None)
    assert hosts.own_ip_address() == "127.0.0.1"
