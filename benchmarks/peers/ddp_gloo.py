"""PyTorch's own DistributedDataParallel over gloo, one process a worker on this machine.

Run as `python -m benchmarks.peers.ddp_gloo`.
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
from torch.nn.parallel import DistributedDataParallel

from .workload import (
    cycle_batches,
    make_model,
    make_optimizer,
    print_measurement,
    run_in_processes,
    share_cores,
    train_step,
)


def measure(
    *, model: str, num_workers: int, batch_size: int, seconds: float, warmup_seconds: float, backend: str = "gloo"
) -> float:
    """Samples per second of all workers together, over about `seconds` after the warm-up."""
    with tempfile.TemporaryDirectory(prefix="ddp-gloo-") as folder:
        meeting_point = (Path(folder) / "meeting-point").as_uri()
        [rate] = run_in_processes(
            _train, num_workers, backend, meeting_point, model, batch_size, seconds, warmup_seconds
        )
    return rate


def _train(
    rank: int,
    num_workers: int,
    backend: str,
    meeting_point: str,
    model_name: str,
    batch_size: int,
    seconds: float,
    warmup_seconds: float,
    rates: SimpleQueue[float],
) -> None:
    share_cores(num_workers)
    if backend == "paceline":
        import paceline.torch_backend  # noqa: F401 - registers it
    dist.init_process_group(backend, init_method=meeting_point, rank=rank, world_size=num_workers)
    try:
        model = DistributedDataParallel(make_model(model_name))
        optimizer = make_optimizer(model)
        batches = cycle_batches(batch_size, seed=rank)

        def step() -> None:
            train_step(model, optimizer, next(batches))

        rate = batch_size * num_workers * _num_steps_per_s(step, seconds, warmup_seconds)
        if rank == 0:
            rates.put(rate)
    finally:
        dist.destroy_process_group()


def _num_steps_per_s(step: Callable[[], None], seconds: float, warmup_seconds: float) -> float:
    """Steps per second in a window whose number of steps all ranks agree on beforehand.

    So nothing but training is exchanged inside it; were a rank to stop a step early, the others would wait for ever.
    """
    num_steps = max(1, round(seconds / _typical_step_s(step, warmup_seconds)))
    num_steps = int(_from_rank_0(num_steps))
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    dist.barrier()
    return num_steps / (time.perf_counter() - start)


def _typical_step_s(step: Callable[[], None], warmup_seconds: float) -> float:
    """Train until rank 0 has warmed up; the median, since the first steps build their graph and buckets."""
    durations: list[float] = []
    go_on = 1.0
    warmed_up_at = time.perf_counter() + warmup_seconds
    while go_on or not durations:
        start = time.perf_counter()
        step()
        now = time.perf_counter()
        durations.append(now - start)
        go_on = _from_rank_0(now < warmed_up_at)
    return statistics.median(durations)


def _from_rank_0(number: float) -> float:
    """Rank 0's number, on every rank."""
    tensor = torch.tensor([number], dtype=torch.float64)
    dist.broadcast(tensor, src=0)
    return tensor.item()


if __name__ == "__main__":
    print_measurement(measure, description=__doc__)
