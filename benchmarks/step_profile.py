"""Where a step's time goes: the phases of a training step in plain PyTorch, in lockstep, and under `all-reduce`.

Every worker runs windows of the three one after another, many times, so that a change of the machine's mood meets all
of them. In lockstep means plain steps with a meeting of all workers after each: what differs from plain is the price of
going together, whatever is exchanged. Medians over steps and workers, in microseconds; the exchange lies in backward.

    python benchmarks/step_profile.py --model convnet --batch-size 100
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing.queues import SimpleQueue
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Any, cast

import torch
import torch.nn.functional as F
from peers.workload import make_model, make_optimizer, run_in_processes, share_cores
from report import tell
from rich.table import Table
from throughput import FixedBatches, whole
from torch.utils.data import DataLoader

import paceline

PHASES = ("next batch", "zero_grad", "forward", "backward", "step", "meeting")
WAYS = ("plain", "lockstep", "all-reduce")
Profile = dict[str, dict[str, float]]
"""For each way, the microseconds of each phase and of the whole step."""


def timed_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> list[float]:
    """When each phase of one step began, and when the last ended."""
    times = [time.perf_counter()]
    images, labels = next(batches)
    times.append(time.perf_counter())
    optimizer.zero_grad()
    times.append(time.perf_counter())
    loss = F.cross_entropy(model(images), labels)
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    times.append(time.perf_counter())
    return times


def repeat(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def train(
    rank: int,
    num_workers: int,
    model_name: str,
    batch_size: int,
    num_windows: int,
    num_steps: int,
    port: int,
    steps_done: SynchronizedArray[ctypes.c_longlong],
    results: SimpleQueue[Profile],
) -> None:
    """One worker; its world is the one that torchrun would make."""
    place = {"RANK": rank, "WORLD_SIZE": num_workers, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_workers}
    meeting = {"TORCHELASTIC_RUN_ID": "profile", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in {**place, **meeting}.items()}
    share_cores(num_workers)
    worker = paceline.init()

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        model = make_model(model_name)
        loader = DataLoader(FixedBatches(batch_size, seed=rank), batch_size=batch_size, collate_fn=whole)
        return model, make_optimizer(model), loader

    plain_model, plain_optimizer, plain_loader = make()
    model, optimizer, loader = worker.prepare(*make())
    plain_batches, batches = repeat(plain_loader), repeat(loader)
    done: Any = steps_done.get_obj()

    def meet() -> None:
        done[rank] += 1
        while min(done) < done[rank]:
            os.sched_yield()

    def step_of(way: str) -> tuple[float, ...]:
        if way == "all-reduce":
            times = timed_step(model, optimizer, batches)
        else:
            times = timed_step(plain_model, plain_optimizer, plain_batches)
            if way == "lockstep":
                meet()
        times.append(time.perf_counter())
        return tuple(later - earlier for earlier, later in pairwise(times))

    measured: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    for window in range(num_windows + 1):
        for way in WAYS:
            meet()
            durations = [step_of(way) for _ in range(num_steps)]
            if window > 0:  # the first one warms up
                measured[way] += durations
    results.put({way: medians(steps) for way, steps in measured.items()})
    os._exit(0)  # the script of this world is not at its end, and nobody evaluates it


def medians(steps: list[tuple[float, ...]]) -> dict[str, float]:
    """Of the seconds of each phase, in microseconds."""
    found = {phase: statistics.median(step[index] for step in steps) * 1e6 for index, phase in enumerate(PHASES)}
    return found | {"whole step": statistics.median(map(sum, steps)) * 1e6}


def mean(profiles: list[Profile]) -> Profile:
    """Over workers."""
    return {
        way: {phase: statistics.fmean(profile[way][phase] for profile in profiles) for phase in profiles[0][way]}
        for way in WAYS
    }


def table_of(found: Profile, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("us", *WAYS):
        table.add_column(heading, justify="left" if heading == "us" else "right")
    for phase in (*PHASES, "whole step"):
        table.add_row(phase, *(f"{found[way][phase]:,.0f}" for way in WAYS))
    return table


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--batch-size", type=int, default=100, help="samples a worker and step")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200, help="of a window")
    args = parser.parse_args()
    steps_done = multiprocessing.get_context("spawn").Array("q", args.workers)
    arguments = (args.model, args.batch_size, args.windows, args.steps, free_port(), steps_done)
    found = mean(cast(list[Profile], run_in_processes(train, args.workers, *arguments)))
    title = f"{args.model}, batch {args.batch_size} a worker, {args.workers} workers; microseconds"
    tell([table_of(found, title)], {"workload": vars(args), "us": found})


if __name__ == "__main__":
    main()
