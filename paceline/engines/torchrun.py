"""The world that torchrun started: all-reduce among its processes."""

from __future__ import annotations

import os
from dataclasses import astuple

import torch
import torch.distributed as dist

from paceline.comm.base import Collective
from paceline.comm.segment import SegmentAddress
from paceline.comm.shared_memory import SharedMemoryCollective
from paceline.comm.torch_distributed import TorchCollective
from paceline.config import RunConfig
from paceline.engines.threads import share_cores
from paceline.engines.world import World
from paceline.records import NullReporter
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import Context


def join(*, seed: int) -> World:
    """Meet the other processes: through shared memory where all are on one host, else through gloo or NCCL."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    config = RunConfig(seed=seed)
    has_own_device = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if has_own_device else torch.device("cpu")
    share_cores(local_size)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if has_own_device else "gloo")
    everyone = dist.group.WORLD
    assert everyone is not None
    collective: Collective = TorchCollective(everyone, device=device, deadline_s=config.deadline_s)
    if not has_own_device and local_size == size:
        collective = _through_shared_memory(collective, config.deadline_s)
    context = Context(
        rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=device, collective=collective
    )
    return World(context, AllReduce(), config, NullReporter())


def _through_shared_memory(meeting: Collective, deadline_s: float) -> Collective:
    control = SharedMemoryCollective.prepare()
    addresses = [SegmentAddress(*numbers) for numbers in meeting.all_gather_object(list(astuple(control.address)))]
    return SharedMemoryCollective(rank=meeting.rank, addresses=addresses, control=control, deadline_s=deadline_s)
