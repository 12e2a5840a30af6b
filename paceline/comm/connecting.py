"""Which collective a group of processes gets, from what its ranks know of one another."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch.distributed import PrefixStore, Store

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective, Timing
from paceline.comm.hierarchical.collective import HierarchicalCollective
from paceline.comm.hosts import host_identity, own_ip_address
from paceline.comm.meeting import exchange
from paceline.comm.process_group.collective import connect_gloo, connect_nccl
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.errors import UsageError

Transport = Literal["none", "shared memory", "gloo", "hierarchical", "nccl"]
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Site:
    """What every rank knows of a rank before they connect."""

    host: str
    """The same for exactly those ranks that can share memory."""
    gpu: str | None
    """The rank's GPU, as `gpu_identity` says it."""
    memory: BlockAddress
    """Where the memory is that it got from `SharedMemoryCollective.prepare`."""


def gpu_identity(device: torch.device) -> str | None:
    """A name that no other GPU has; None of the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def transport(members: Sequence[Site], *, for_messages: bool = False) -> Transport:
    """What carries the tensors of a group.

    Args:
        members: in rank order.
        for_messages: the ranks only send and receive.

    Raises:
        UsageError: some ranks have a GPU and others none, or ranks on several hosts share one.
    """
    if len(members) == 1:
        return "none"
    without = [str(rank) for rank, member in enumerate(members) if member.gpu is None]
    if 0 < len(without) < len(members):
        raise UsageError(f"no GPU on rank {', '.join(without)}, but on others; give a GPU to every rank, or to none")
    if not without and len({member.gpu for member in members}) == len(members):
        return "nccl"
    num_hosts = len({member.host for member in members})
    if num_hosts == 1:
        return "shared memory"
    if not without:
        raise UsageError("workers that share a GPU must be on one host; use a worker a GPU, or the CPU")
    return "gloo" if for_messages or num_hosts == len(members) else "hierarchical"


def needs_store(members: Sequence[Site]) -> bool:
    """Whether `connect_members` needs a store. Raises as `transport`."""
    return transport(members) not in ("none", "shared memory")


def connect(
    store: Store,
    *,
    rank: int,
    size: int,
    deadline_s: float | None,
    device: torch.device = _CPU,
    for_messages: bool = False,
) -> Collective:
    """Meet the other ranks, of which only the number is known, through torch's store. Collective call.

    Args:
        store: where the ranks find one another; nobody else may use its keys. A world of one needs none.
        deadline_s: the longest that any one wait for a rank may take, the meeting included; None for ever.
        device: where this rank's tensors are.
        for_messages: the collective is to send and receive only.

    Raises:
        DeadlineExceeded, PeerLost: as `exchange`, and as `connect_members`.
        UsageError: as `connect_members`.
    """
    if size == 1:
        return AloneCollective()
    memory = SharedMemoryCollective.prepare()
    try:
        mine = json.dumps(asdict(Site(host_identity(), gpu_identity(device), memory.address)))
        said = exchange(store, mine, rank=rank, size=size, deadline_s=deadline_s)
    except BaseException:
        memory.close()
        raise
    return connect_members(
        [_read(text) for text in said],
        rank=rank,
        memory=memory,
        deadline_s=deadline_s,
        store=store,
        device=device,
        for_messages=for_messages,
    )


def connect_members(
    members: Sequence[Site],
    *,
    rank: int,
    memory: SharedBlock,
    deadline_s: float | None,
    store: Store | None = None,
    address: str | None = None,
    device: torch.device = _CPU,
    for_messages: bool = False,
    timing: Timing | None = None,
    names: Sequence[int] | None = None,
) -> Collective:
    """Connect ranks that know one another over what `transport` chooses. Collective call.

    Args:
        members: in rank order.
        memory: what this rank got from `SharedMemoryCollective.prepare`; owned from here on.
        store: where ranks find one another that `needs_store`.
        address: at which other hosts reach this one; none: what `own_ip_address` says, if there are other hosts.
        timing: where to go on counting, for ranks that had another collective before.
        names: what errors call the ranks of one host or one a host, where that is not their numbers here.

    Raises:
        DeadlineExceeded: a rank did not come.
        PeerLost: a rank is gone; on one host this is noticed at once.
        UsageError: as `transport` and `own_ip_address`.
    """
    with ExitStack() as unless_taken_over:
        unless_taken_over.callback(memory.close)
        chosen = transport(members, for_messages=for_messages)
        if chosen == "shared memory":
            unless_taken_over.pop_all()
            addresses = [member.memory for member in members]
            return SharedMemoryCollective(
                rank=rank, addresses=addresses, control=memory, deadline_s=deadline_s, timing=timing, names=names
            )
    if chosen == "none":
        return AloneCollective(timing=timing)
    assert store is not None
    store, address = PrefixStore(chosen, store), address or own_ip_address()
    if chosen == "nccl":
        size = len(members)
        return connect_nccl(store, rank=rank, size=size, device=device, address=address, deadline_s=deadline_s)
    if chosen == "gloo":
        size = len(members)
        return connect_gloo(
            store, rank=rank, size=size, address=address, deadline_s=deadline_s, names=names, timing=timing
        )
    hosts = _ranks_by_host(members)
    return HierarchicalCollective(store, rank=rank, hosts=hosts, address=address, deadline_s=deadline_s, timing=timing)


def connect_some(
    ranks: Sequence[int], *, via: Collective, store: Store | None, name: str, device: torch.device = _CPU
) -> Collective | None:
    """Connect some ranks of a collective among themselves, at first without a deadline. Collective call of all of them.

    Args:
        ranks: of `via`; their order is the new one.
        store: where ranks find one another that `needs_store`.
        name: of this collective alone among those of the store.

    Returns:
        This rank's end; None if it is not among them.

    Raises:
        UsageError: there is no store, and the ranks need one; or as `transport`.
        DeadlineExceeded, PeerLost: as `connect_members`.
    """
    memory = SharedMemoryCollective.prepare()
    with ExitStack() as unless_taken_over:
        unless_taken_over.callback(memory.close)
        said = via.all_gather_object(asdict(Site(host_identity(), gpu_identity(device), memory.address)))
        if via.rank not in ranks:
            via.barrier()  # until the others have opened what they were told of
            return None
        members = [site_of(said[rank]) for rank in ranks]
        if store is None and needs_store(members):
            raise UsageError("workers on several hosts need a store to meet; this run has none")
        unless_taken_over.pop_all()
    found = connect_members(
        members,
        rank=list(ranks).index(via.rank),
        memory=memory,
        deadline_s=None,
        store=None if store is None else PrefixStore(name, store),
        device=device,
    )
    via.barrier()
    return found


def _read(text: str) -> Site:
    return site_of(json.loads(text))


def site_of(said: Mapping[str, Any]) -> Site:
    """What `asdict` has made plain data of."""
    return Site(**{**said, "memory": BlockAddress(**said["memory"])})


def _ranks_by_host(members: Sequence[Site]) -> list[list[int]]:
    """The ranks of each host, in the order of the hosts' first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        hosts.setdefault(member.host, []).append(rank)
    return list(hosts.values())
