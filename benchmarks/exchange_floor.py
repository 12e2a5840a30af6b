"""What averaging a model's gradients takes at least where workers share memory: passes over memory, and nothing else.

Every process copies its gradients into memory that all map (`copy`), and averages its share of all processes'
(`average`): it reads that from each, looks whether the mean is finite, and writes the mean to each. `both` is one after
the other, with meetings before, between and after. An optimizer that reads gradients (`update`) does so under plain
PyTorch as well. All processes do the same at once; medians in milliseconds, the mean over processes.

    python benchmarks/exchange_floor.py
    python benchmarks/exchange_floor.py --workers 4 --mbytes 100
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from peers.workload import run_in_processes, share_cores
from report import tell
from rich.table import Table
from torch import Tensor

from paceline.comm.reduction import Reduction
from paceline.comm.shared_memory.finding import seems_finite
from paceline.comm.shared_memory.shares import blocks_of, shares_of

PARTS = ("copy", "average", "both", "update")


def work(rank: int, workers: int, memory: list[Tensor], done: Any, rounds: int, results: Any) -> None:
    """One process, whose exchanged memory is `memory[rank]`; puts the seconds of each part."""
    share_cores(workers)
    gradients, parameters = torch.randn_like(memory[rank]), torch.zeros_like(memory[rank])
    share = shares_of(memory[rank], workers)[rank]
    blocks = blocks_of([tensor[share] for tensor in memory])
    reduction = Reduction("mean", torch.float32)

    def meet() -> None:
        done[rank] += 1
        while min(done) < done[rank]:
            os.sched_yield()

    def copy() -> None:
        memory[rank].copy_(gradients)

    def average() -> None:
        for parts in blocks:
            reduction(parts, parts[0])
            seems_finite(parts[0])
            for part in parts[1:]:
                part.copy_(parts[0])

    def both() -> None:
        copy()
        meet()
        average()
        meet()

    def update() -> None:
        parameters.add_(memory[rank], alpha=-1e-4)

    def seconds(part: Callable[[], None]) -> float:
        meet()
        start_s = time.perf_counter()
        part()
        return time.perf_counter() - start_s

    turns = [[seconds(part) for part in (copy, average, both, update)] for _ in range(rounds + 2)][2:]
    results.put([statistics.median(taken) for taken in zip(*turns, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mbytes", type=float, default=44.7, help="of gradients, a worker; ResNet-18 has 44.7")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    memory = [torch.zeros(int(args.mbytes * 1e6 / 4)).share_memory_() for _ in range(args.workers)]
    done = multiprocessing.get_context("spawn").RawArray("q", args.workers)
    found: Any = run_in_processes(work, args.workers, memory, done, args.rounds)
    took_ms = {part: 1e3 * statistics.fmean(each) for part, each in zip(PARTS, zip(*found, strict=True), strict=True)}
    table = Table(*PARTS, title=f"{args.mbytes:g} MB, {args.workers} workers, milliseconds")
    table.add_row(*(f"{took_ms[part]:.1f}" for part in PARTS))
    tell([table], {"workload": vars(args), "ms": took_ms})


if __name__ == "__main__":
    main()
