"""A script of Horovod's, on Paceline's `horovod.torch`, one process a worker on this machine.

Run as `python -m benchmarks.peers.horovod_script`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
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

    rate = batch_size * num_workers * _num_steps_per_s(step, seconds, warmup_seconds)
    if rank == 0:
        rates.put(rate)
    hvd.shutdown()


def _join(rank: int, num_workers: int, meeting_point: str) -> None:
    """What `paceline run` does before it starts the script."""
    store = dist.FileStore(meeting_point, num_workers)
    collective = connect(store, rank=rank, size=num_workers, deadline_s=60.0)
    context = Context(rank, Membership.first(num_workers), rank, num_workers, torch.device("cpu"), collective)
    enter(World(context, AllReduce(), RunConfig(), NullReporter(), store=store))


def _num_steps_per_s(step: Callable[[], None], seconds: float, warmup_seconds: float) -> float:
    """Steps per second in a window whose number of steps all ranks agree on beforehand."""
    durations: list[float] = []
    go_on = True
    warmed_up_at = time.perf_counter() + warmup_seconds
    while go_on or not durations:
        start = time.perf_counter()
        step()
        now = time.perf_counter()
        durations.append(now - start)
        go_on = hvd.broadcast_object(now < warmed_up_at)
    num_steps = hvd.broadcast_object(max(1, round(seconds / statistics.median(durations))))
    hvd.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    hvd.barrier()
    return float(num_steps / (time.perf_counter() - start))


if __name__ == "__main__":
    print_measurement(measure, description=__doc__)
