"""The ceiling: as many processes as workers, training side by side without any communication.

In lockstep, its synchronous form, nobody begins a step before all have ended the last: what is lost then is lost to
every synchronous strategy, however little its exchange costs.

Run as `python -m benchmarks.peers.ceiling`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from typing import Literal

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
_ENDED = 2**62


def measure(
    *,
    model: str,
    num_workers: int,
    batch_size: int,
    seconds: float,
    warmup_seconds: float,
    mode: Literal["free", "lockstep"] = "free",
) -> float:
    """Samples per second of all processes together; the timed windows start at one barrier."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_workers)
    samples_done = context.RawArray("q", num_workers) if mode == "lockstep" else None
    return sum(run_in_processes(_train, num_workers, model, batch_size, seconds, warmup_seconds, barrier, samples_done))


def _train(
    rank: int,
    num_workers: int,
    model_name: str,
    batch_size: int,
    seconds: float,
    warmup_seconds: float,
    barrier: Barrier,
    samples_done: ctypes.Array[ctypes.c_longlong] | None,
    rates: SimpleQueue[float],
) -> None:
    share_cores(num_workers)
    model = make_model(model_name)
    optimizer = make_optimizer(model)
    batches = cycle_batches(batch_size, seed=rank)

    def say(num_done: int) -> None:
        if samples_done is not None:
            samples_done[rank] = num_done

    def meet(num_done: int) -> None:
        say(num_done)
        while samples_done is not None and min(samples_done) < num_done:
            os.sched_yield()

    def num_samples_per_s(duration_s: float) -> float:
        barrier.wait(START_TIMEOUT_S)
        say(0)
        start = now = time.perf_counter()
        num_samples = 0
        while now - start < duration_s:
            train_step(model, optimizer, next(batches))
            num_samples += batch_size
            meet(num_samples)
            now = time.perf_counter()
        say(_ENDED)
        return num_samples / (now - start)

    num_samples_per_s(warmup_seconds)
    rates.put(num_samples_per_s(seconds))


if __name__ == "__main__":
    print_measurement(measure, description=__doc__, modes=("free", "lockstep"))
