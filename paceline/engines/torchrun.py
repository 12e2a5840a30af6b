"""The world that torchrun started: all-reduce among its processes."""

import os

import torch
from torch.distributed import PrefixStore, rendezvous

from paceline.comm.connecting import connect
from paceline.config import RunConfig
from paceline.engines.world import World
from paceline.membership import Membership
from paceline.memory import keep_freed_memory
from paceline.records import NullReporter
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import Context


def join(*, seed: int, deadline_s: float = RunConfig.deadline_s) -> World:
    """Meet the other processes; torch's default process group stays the script's own."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    config = RunConfig(seed=seed, deadline_s=deadline_s)
    has_own_device = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if has_own_device else torch.device("cpu")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    keep_freed_memory()
    store, _, _ = next(rendezvous("env://", rank, size))
    collective = connect(
        PrefixStore("paceline", store), rank=rank, size=size, device=device, deadline_s=config.deadline_s
    )
    context = Context(
        rank=rank,
        membership=Membership.first(size),
        local_rank=local_rank,
        local_size=local_size,
        device=device,
        collective=collective,
    )
    return World(context, AllReduce(), config, NullReporter(), store=PrefixStore("groups", store))
