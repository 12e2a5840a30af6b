"""How a worker of an elastic job comes into its next membership, for the first time or after a reset."""

import os
import socket
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from paceline.comm.connecting import Site, connect_members, gpu_identity, needs_store, site_of
from paceline.comm.hosts import host_identity, own_ip_address
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.config import RunConfig
from paceline.engines.world import World
from paceline.horovod.line import Line
from paceline.membership import Membership
from paceline.memory import keep_freed_memory
from paceline.records import NullReporter
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import Context


def join(line: Line) -> World:
    """Wait for a place, and meet the others of the membership.

    Raises:
        SystemExit: there is no place any more.
        PeerLost, DeadlineExceeded: one of them has died meanwhile; ask again.
    """
    deadline_s = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or RunConfig.deadline_s)
    device = torch.device("cpu")
    memory = SharedMemoryCollective.prepare()
    try:
        mine = asdict(Site(host_identity(), gpu_identity(device), memory.address))
        place = line.ask({"member": mine, "address": own_ip_address(), "port": _free_port()})
    except BaseException:
        memory.close()
        raise
    about = place["place"]
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in about.items()})
    rank, size = about["RANK"], about["SIZE"]
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // about["LOCAL_SIZE"]))
    keep_freed_memory()
    members = [site_of(each["member"]) for each in place["members"]]
    store = _store(place["members"][0], rank, size, deadline_s) if needs_store(members) else None
    collective = connect_members(
        members,
        rank=rank,
        memory=memory,
        deadline_s=deadline_s,
        store=None if store is None else PrefixStore("paceline", store),
        device=device,
    )
    context = Context(
        rank=rank,
        membership=Membership(place["epoch"], tuple(range(size))),
        local_rank=about["LOCAL_RANK"],
        local_size=about["LOCAL_SIZE"],
        device=device,
        collective=collective,
    )
    config = RunConfig(deadline_s=deadline_s)
    groups = None if store is None else PrefixStore("groups", store)
    return World(context, AllReduce(), config, NullReporter(), store=groups)


def _store(first: dict[str, Any], rank: int, size: int, deadline_s: float) -> Store:
    """The first rank keeps it."""
    return TCPStore(
        first["address"],
        first["port"],
        world_size=size,
        is_master=rank == 0,
        timeout=timedelta(seconds=deadline_s),
        wait_for_workers=False,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
