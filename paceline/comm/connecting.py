"""Which collective a group of processes gets, and how its ranks find one another through torch's store."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, cast

import psutil
from torch.distributed import PrefixStore, Store

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from paceline.comm.hierarchical.collective import connect_hierarchical
from paceline.comm.process_group.collective import connect_gloo
from paceline.comm.shared_memory.block import BlockAddress
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.errors import DeadlineExceeded, UsageError

_ELSEWHERE = "192.0.2.1"  # an address that is nobody's (RFC 5737): the way there is the way out of this host


@dataclass(frozen=True)
class _Member:
    """What a rank says of itself."""

    host: str
    ip_address: str
    pid: int
    fd: int
    num_bytes: int

    @property
    def segment(self) -> BlockAddress:
        return BlockAddress(self.pid, self.fd, self.num_bytes)


def connect(store: Store, *, rank: int, size: int, deadline_s: float, for_messages: bool = False) -> Collective:
    """Meet the other ranks, and choose what carries their tensors. Collective call.

    Shared memory on one host; gloo between hosts of one rank each, and shared memory and gloo where hosts have more.

    Args:
        store: where the ranks find one another; nobody else may use its keys.
        deadline_s: the longest that any one wait for a rank may take, the meeting included.
        for_messages: the collective is to send and receive only.

    Raises:
        DeadlineExceeded: a rank did not come; the message names it.
        PeerLost: a rank came and is gone.
    """
    if size == 1:
        return AloneCollective()
    control = SharedMemoryCollective.prepare()
    try:
        address = control.address
        mine = _Member(host_identity(), own_ip_address(), address.pid, address.fd, address.num_bytes)
        members = _meet(store, mine, rank=rank, size=size, deadline_s=deadline_s)
    except BaseException:
        control.close()
        raise
    hosts = _ranks_by_host(members)
    if len(hosts) == 1:
        addresses = [member.segment for member in members]
        return SharedMemoryCollective(rank=rank, addresses=addresses, control=control, deadline_s=deadline_s)
    control.close()
    store = PrefixStore("gloo", store)
    if for_messages or len(hosts) == size:
        return connect_gloo(store, rank=rank, size=size, address=mine.ip_address, deadline_s=deadline_s)
    return connect_hierarchical(store, rank=rank, hosts=hosts, address=mine.ip_address, deadline_s=deadline_s)


def host_identity() -> str:
    """The same for exactly those processes that can share memory: Ray's node, or else machine and namespaces."""
    ray = _running_ray()
    if ray is not None:
        return f"ray node {ray.get_runtime_context().get_node_id()}"
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    namespaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
    return " ".join(map(str, (socket.gethostname(), boot, *namespaces)))


def own_ip_address() -> str:
    """The address at which ranks on other hosts reach this one.

    That of the interface GLOO_SOCKET_IFNAME, or what Ray says, or where the way to MASTER_ADDR, or out, begins.

    Raises:
        UsageError: there is no such interface, or it has no IPv4 address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return _address_of(interface)
    ray = _running_ray()
    if ray is not None:
        return str(ray.util.get_node_ip_address())
    for destination in (os.environ.get("MASTER_ADDR"), _ELSEWHERE):
        address = _start_of_way_to(destination) if destination else None
        if address is not None and not address.startswith("127."):
            return address
    return "127.0.0.1"


def _meet(store: Store, mine: _Member, *, rank: int, size: int, deadline_s: float) -> list[_Member]:
    """Every rank's word, in rank order."""
    store.set(f"member {rank}", json.dumps(asdict(mine)))
    members = []
    for other in range(size):
        key = f"member {other}"
        try:
            store.wait([key], timedelta(seconds=deadline_s))
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"rank {other} has not come to the process group within {deadline_s} s; see whether it runs ({error})"
            ) from None
        members.append(_Member(**json.loads(store.get(key))))
    return members


def _ranks_by_host(members: Sequence[_Member]) -> list[list[int]]:
    """The ranks of each host, in the order of the hosts' first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        hosts.setdefault(member.host, []).append(rank)
    return list(hosts.values())


def _running_ray() -> Any:
    """Ray, if this process is part of a Ray cluster. Whoever is has imported it already."""
    ray = cast(Any, sys.modules.get("ray"))
    return ray if ray is not None and ray.is_initialized() else None


def _address_of(interface: str) -> str:
    for entry in psutil.net_if_addrs().get(interface, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    known = ", ".join(sorted(psutil.net_if_addrs()))
    raise UsageError(f"GLOO_SOCKET_IFNAME names {interface}, which has no IPv4 address here; there are {known}")


def _start_of_way_to(host: str) -> str | None:
    """The local address from which packets to `host` would leave; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
