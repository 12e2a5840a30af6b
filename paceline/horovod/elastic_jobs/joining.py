"""How a worker of an elastic job comes into its next membership, for the first time or after a reset."""

import os
import socket
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore

from paceline.comm.connecting import Site, connect_members, gpu_identity, needs_store, site_of
from paceline.comm.hosts import host_identity, own_ip_address
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.config import RunConfig
from paceline.engines.world import World
from paceline.errors import PeerLost
from paceline.horovod.line import Line
from paceline.horovod.recording import Standing
from paceline.membership import Membership
from paceline.memory import keep_freed_memory
from paceline.records import NullReporter
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import Context


def join(line: Line, standing: Standing) -> tuple[World, Standing]:
    """Wait for a place, and meet the others of the membership; how far the furthest of them has come.

    Args:
        standing: how far this worker has.

    Raises:
        SystemExit: there is no place any more.
        PeerLost, DeadlineExceeded: one of them has died meanwhile; ask again.
    """
    deadline_s = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or RunConfig.deadline_s)
    device = torch.device("cpu")
    memory = SharedMemoryCollective.prepare()
    with ExitStack() as unless_taken_over, socket.socket() as bound:
        unless_taken_over.callback(memory.close)
        bound.bind(("", 0))  # kept until the store has it, lest anybody else take the port
        mine = asdict(Site(host_identity(), gpu_identity(device), memory.address))
        meeting = {"address": own_ip_address(), "port": bound.getsockname()[1]}
        place = line.ask({"member": mine, "standing": standing, **meeting})
        about = place["place"]
        os.environ.update({f"HOROVOD_{name}": str(value) for name, value in about.items()})
        rank, size = about["RANK"], about["SIZE"]
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // about["LOCAL_SIZE"]))
        keep_freed_memory()
        members = [site_of(each["member"]) for each in place["members"]]
        store = _store(place["members"][0], bound, rank, size, deadline_s) if needs_store(members) else None
        unless_taken_over.pop_all()
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
    furthest = max(Standing(*each["standing"]) for each in place["members"])
    return World(context, AllReduce(), config, NullReporter(), store=groups), furthest


def _store(first: dict[str, Any], bound: socket.socket, rank: int, size: int, deadline_s: float) -> Store:
    """The first rank keeps it, at the socket that it has bound. Raises PeerLost if that rank is gone."""
    try:
        return TCPStore(
            first["address"],
            first["port"],
            world_size=size,
            is_master=rank == 0,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
            master_listen_fd=bound.detach() if rank == 0 else None,
        )
    except DistNetworkError as error:
        raise PeerLost(f"rank 0 is lost, which was to keep the store where ranks meet: {error}") from None
