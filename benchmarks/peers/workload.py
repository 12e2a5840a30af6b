"""What every system under measurement trains: the same model, batches, loss, optimizer and threads."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models import build

LEARNING_RATE = 1e-4
NUM_BATCHES = 16
IMAGE_SHAPE = (3, 32, 32)
NUM_CLASSES = 10

Batch = tuple[Tensor, Tensor]


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def share_cores(num_workers: int) -> None:
    """Give this process its part of the cores, one at least, so that workers do not fight for them."""
    torch.set_num_threads(max(1, num_cores() // num_workers))


def make_model(name: str) -> nn.Module:
    """The named reference model, with the same initial parameters in every process."""
    torch.manual_seed(0)
    return build(name)


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def cycle_batches(batch_size: int, *, seed: int) -> Iterator[Batch]:
    """A few random batches of CIFAR's shape, drawn once and repeated for ever: loading data is not measured."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn((NUM_BATCHES, batch_size, *IMAGE_SHAPE), generator=generator)
    labels = torch.randint(NUM_CLASSES, (NUM_BATCHES, batch_size), generator=generator)
    return itertools.cycle(list(zip(images, labels, strict=True)))


def backward(model: nn.Module, batch: Batch) -> None:
    """Forward and backward; the gradients are left in the parameters."""
    images, labels = batch
    F.cross_entropy(model(images), labels).backward()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    backward(model, batch)
    optimizer.step()


def steps_per_s(
    step: Callable[[], None],
    seconds: float,
    warmup_seconds: float,
    *,
    from_rank_0: Callable[[float], float],
    barrier: Callable[[], object],
) -> float:
    """Steps per second in a window whose number of steps all ranks agree on beforehand.

    So nothing but training is exchanged inside it; were a rank to stop a step early, the others would wait for ever.

    Args:
        step: trains on one batch.
        from_rank_0: gives rank 0's number to every rank.
        barrier: waits for all ranks.
    """
    num_steps = int(from_rank_0(max(1, round(seconds / _typical_step_s(step, warmup_seconds, from_rank_0)))))
    barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    barrier()
    return num_steps / (time.perf_counter() - start)


def _typical_step_s(step: Callable[[], None], warmup_seconds: float, from_rank_0: Callable[[float], float]) -> float:
    """Train until rank 0 has warmed up; the median, since the first steps build their graph and buckets."""
    durations: list[float] = []
    go_on = 1.0
    warmed_up_at = time.perf_counter() + warmup_seconds
    while go_on or not durations:
        start = time.perf_counter()
        step()
        now = time.perf_counter()
        durations.append(now - start)
        go_on = from_rank_0(now < warmed_up_at)
    return statistics.median(durations)


def run_in_processes(train: Callable[..., None], num_workers: int, *arguments: object) -> list[float]:
    """Call `train(rank, num_workers, *arguments, results)` in a process a rank; return what they `put` into `results`.

    Raises:
        ProcessRaisedException, ProcessExitedException: one failed; the others have been ended.
    """
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(train, args=(num_workers, *arguments, results), nprocs=num_workers)
    numbers: list[float] = []
    while not results.empty():
        numbers.append(results.get())
    return numbers


def print_measurement(measure: Callable[..., float], *, description: str, modes: tuple[str, ...] = ()) -> None:
    """The command line of a measurement: run it once and print what was asked and what came out as JSON."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=100, help="samples a worker and step")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the timed window")
    parser.add_argument("--warmup-seconds", type=float, default=3.0)
    if modes:
        parser.add_argument("--mode", choices=modes, default=modes[0])
    asked = vars(parser.parse_args())
    print(json.dumps({**asked, "samples_per_s": measure(**asked)}))
