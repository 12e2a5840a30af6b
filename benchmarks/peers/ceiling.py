"""The ceiling: as many processes as workers, training side by side without any communication.

Run as `python -m benchmarks.peers.ceiling`.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier

from .workload import (
    cycle_batches,
    make_model,
    make_optimizer,
    print_measurement,
    run_in_processes,
    share_cores,
    train_step,
)

START_TIMEOUT_S = 300.0


def measure(*, model: str, num_workers: int, batch_size: int, seconds: float, warmup_seconds: float) -> float:
    """Samples per second of all processes together; the timed windows start at one barrier."""
    barrier = multiprocessing.get_context("spawn").Barrier(num_workers)
    return sum(run_in_processes(_train, num_workers, model, batch_size, seconds, warmup_seconds, barrier))


def _train(
    rank: int,
    num_workers: int,
    model_name: str,
    batch_size: int,
    seconds: float,
    warmup_seconds: float,
    barrier: Barrier,
    rates: SimpleQueue[float],
) -> None:
    share_cores(num_workers)
    model = make_model(model_name)
    optimizer = make_optimizer(model)
    batches = cycle_batches(batch_size, seed=rank)

    def num_samples_per_s(duration_s: float) -> float:
        barrier.wait(START_TIMEOUT_S)
        start = now = time.perf_counter()
        num_samples = 0
        while now - start < duration_s:
            train_step(model, optimizer, next(batches))
            num_samples += batch_size
            now = time.perf_counter()
        return num_samples / (now - start)

    num_samples_per_s(warmup_seconds)
    rates.put(num_samples_per_s(seconds))


if __name__ == "__main__":
    print_measurement(measure, description=__doc__)
