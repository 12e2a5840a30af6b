"""A script of Horovod's, on Paceline's `horovod.torch`, one process a worker on this machine.

Run as `python -m benchmarks.peers.horovod_script`.
"""

from __future__ import annotations

import tempfile
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.horovod.torch as hvd
from paceline.comm.connecting import connect
from paceline.config import RunConfig
from paceline.engines.world import World, enter
from paceline.membership import Membership
from paceline.memory import keep_freed_memory
from paceline.records import NullReporter
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import Context

from .workload import (
    cycle_batches,
    make_model,
    make_optimizer,
    print_measurement,
    run_in_processes,
    share_cores,
    steps_per_s,
    train_step,
)


def measure(*, model: str, num_workers: int, batch_size: int, seconds: float, warmup_seconds: float) -> float:
    """Samples per second of all workers together, over about `seconds` after the warm-up."""
    with tempfile.TemporaryDirectory(prefix="horovod-script-") as folder:
        meeting_point = str(Path(folder) / "meeting-point")
        [rate] = run_in_processes(_train, num_workers, meeting_point, model, batch_size, seconds, warmup_seconds)
    return rate


def _train(
    rank: int,
    num_workers: int,
    meeting_point: str,
    model_name: str,
    batch_size: int,
    seconds: float,
    warmup_seconds: float,
    rates: SimpleQueue[float],
) -> None:
    share_cores(num_workers)
    keep_freed_memory()
    _join(rank, num_workers, meeting_point)
    hvd.init()
    model = make_model(model_name)
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    batches = cycle_batches(batch_size, seed=rank)

    def step() -> None:
        train_step(model, optimizer, next(batches))

    steps = steps_per_s(step, seconds, warmup_seconds, from_rank_0=hvd.broadcast_object, barrier=hvd.barrier)
    if rank == 0:
        rates.put(batch_size * num_workers * steps)
    hvd.shutdown()


def _join(rank: int, num_workers: int, meeting_point: str) -> None:
    """What `paceline run` does before it starts the script."""
    store = dist.FileStore(meeting_point, num_workers)
    collective = connect(store, rank=rank, size=num_workers, deadline_s=60.0)
    context = Context(rank, Membership.first(num_workers), rank, num_workers, torch.device("cpu"), collective)
    enter(World(context, AllReduce(), RunConfig(), NullReporter(), store=store))


if __name__ == "__main__":
    print_measurement(measure, description=__doc__)
