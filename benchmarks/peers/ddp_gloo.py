"""PyTorch's own DistributedDataParallel over gloo, one process a worker on this machine.

Run as `python -m benchmarks.peers.ddp_gloo`.
"""

from __future__ import annotations

import tempfile
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
    steps_per_s,
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

        rate = (
            batch_size
            * num_workers
            * steps_per_s(step, seconds, warmup_seconds, from_rank_0=_from_rank_0, barrier=dist.barrier)
        )
        if rank == 0:
            rates.put(rate)
    finally:
        dist.destroy_process_group()


def _from_rank_0(number: float) -> float:
    """Rank 0's number, on every rank."""
    tensor = torch.tensor([number], dtype=torch.float64)
    dist.broadcast(tensor, src=0)
    return tensor.item()


if __name__ == "__main__":
    print_measurement(measure, description=__doc__)
