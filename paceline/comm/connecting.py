"""Which collective a group of processes gets, and how its ranks find one another through torch's store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch.distributed import PrefixStore, Store

from paceline.comm.alone import AloneCollective
from paceline.comm.arguments import timeout_of
from paceline.comm.base import Collective
from paceline.comm.hierarchical.collective import HierarchicalCollective
from paceline.comm.hosts import host_identity, own_ip_address
from paceline.comm.process_group.collective import connect_gloo, connect_nccl
from paceline.comm.shared_memory.block import BlockAddress
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.errors import DeadlineExceeded

Transport = Literal["shared memory", "gloo", "hierarchical", "nccl"]
_CPU = torch.device("cpu")


def transport(hosts: Sequence[Sequence[int]], gpus: Sequence[str | None], *, for_messages: bool = False) -> Transport:
    """What carries the tensors of several ranks.

    Args:
        hosts: the ranks of each host.
        gpus: each rank's GPU, by a name that no other GPU has; None where a rank's tensors are on the CPU.
        for_messages: the ranks only send and receive.
    """
    if None not in gpus and len(set(gpus)) == len(gpus):
        return "nccl"
    if len(hosts) == 1:
        return "shared memory"
    return "gloo" if for_messages or len(hosts) == len(gpus) else "hierarchical"


def connect(
    store: Store,
    *,
    rank: int,
    size: int,
    deadline_s: float | None,
    device: torch.device = _CPU,
    for_messages: bool = False,
) -> Collective:
    """Meet the other ranks over what `transport` chooses. Collective call.

    Args:
        store: where the ranks find one another; nobody else may use its keys. A world of one needs none.
        deadline_s: the longest that any one wait for a rank may take, the meeting included; None for ever.
        device: where this rank's tensors are.
        for_messages: the collective is to send and receive only.

    Raises:
        DeadlineExceeded: a rank did not come; the message names it.
        PeerLost: a rank came and is gone.
        UsageError: as `own_ip_address`.
    """
    if size == 1:
        return AloneCollective()
    control = SharedMemoryCollective.prepare()
    try:
        mine = _Member(host_identity(), own_ip_address(), _identity_of(device), control.address)
        members = _meet(store, mine, rank=rank, size=size, deadline_s=deadline_s)
    except BaseException:
        control.close()
        raise
    hosts = _ranks_by_host(members)
    chosen = transport(hosts, [member.gpu for member in members], for_messages=for_messages)
    if chosen == "shared memory":
        addresses = [member.memory for member in members]
        return SharedMemoryCollective(rank=rank, addresses=addresses, control=control, deadline_s=deadline_s)
    control.close()
    store, address = PrefixStore(chosen, store), mine.ip_address
    if chosen == "nccl":
        return connect_nccl(store, rank=rank, size=size, device=device, address=address, deadline_s=deadline_s)
    if chosen == "gloo":
        return connect_gloo(store, rank=rank, size=size, address=address, deadline_s=deadline_s)
    return HierarchicalCollective(store, rank=rank, hosts=hosts, address=address, deadline_s=deadline_s)


@dataclass(frozen=True)
class _Member:
    """What a rank says of itself."""

    host: str
    ip_address: str
    gpu: str | None
    memory: BlockAddress


def _identity_of(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _meet(store: Store, mine: _Member, *, rank: int, size: int, deadline_s: float | None) -> list[_Member]:
    store.set(f"member {rank}", json.dumps(asdict(mine)))
    members = []
    for other in range(size):
        key = f"member {other}"
        try:
            store.wait([key], timeout_of(deadline_s))
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"rank {other} has not come to the process group within {deadline_s} s; see whether it runs ({error})"
            ) from None
        said = json.loads(store.get(key))
        members.append(_Member(**{**said, "memory": BlockAddress(**said["memory"])}))
    return members


def _ranks_by_host(members: Sequence[_Member]) -> list[list[int]]:
    """The ranks of each host, in the order of the hosts' first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        hosts.setdefault(member.host, []).append(rank)
    return list(hosts.values())
