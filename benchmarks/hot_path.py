"""What a strategy costs each step: windows of the same loop with and without Paceline, in the same processes.

Every worker process holds one model for each contender and trains windows of them in turn, many times, so that a change
of the machine's mood meets all of them. `plain` is PyTorch alone; `lockstep` adds a meeting of all workers after each
step and nothing else; `ddp-gloo` is PyTorch's own DistributedDataParallel; `-unchecked` leaves out all that watches
over the script (docs/script.md); `elastic` is all-reduce with `--elastic`, in which nobody dies. Ratios are of windows
within a round: their median, and the quartiles. Processes keep the memory that they free, as workers of a run do
(`paceline/memory.py`).

    python benchmarks/hot_path.py --model convnet --batch-size 100
    python benchmarks/hot_path.py --model resnet18 --batch-size 4 --steps 6
    python benchmarks/hot_path.py --only plain all-reduce all-reduce-unchecked ps-bsp ps-bsp-unchecked --rounds 100
    python benchmarks/hot_path.py --only plain all-reduce ps-bsp ps-asp --checks
    python benchmarks/hot_path.py --only plain single --workers 1
    python benchmarks/hot_path.py --only plain all-reduce elastic ddp-gloo
    python benchmarks/hot_path.py --only plain lockstep single all-reduce ps-bsp --model resnet18 --device cuda
    python benchmarks/hot_path.py --only plain lockstep ps-bsp --model resnet18 --batch-size 4 --steps 4 --servers 2
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch
from hot_path_checks import Spent, unchecked, unhooked
from hot_path_contenders import CONTENDERS, DDP, MEETING_BY_ADDRESS, PLAIN, STRATEGIES, UNCHECKED, Servers, Worker
from peers.workload import share_cores
from report import tell
from rich.table import Table

from paceline.memory import keep_freed_memory

COMPARISONS = (
    ("lockstep", "plain"),
    ("single", "plain"),
    ("all-reduce", "lockstep"),
    ("all-reduce", "plain"),
    ("elastic", "all-reduce"),
    ("elastic", "ddp-gloo"),
    ("ddp-gloo", "lockstep"),
    ("ps-bsp", "lockstep"),
    ("ps-bsp", "plain"),
    ("ps-asp", "plain"),
    *((name, f"{name}{UNCHECKED}") for name in STRATEGIES),
)


def work(
    rank: int,
    size: int,
    line: Connection,
    done: Any,
    model: str,
    batch_size: int,
    servers: Mapping[str, Servers],
    names: Sequence[str],
    rounds: int,
    steps: int,
    counts_checks: bool,
    device: str,
) -> None:
    """A worker process: windows of `steps` steps of each contender, in turn; sends the seconds of each round. If it
    counts checks, these are the core's: of plain steps, and of the others' checks."""
    share_cores(size)
    keep_freed_memory()
    worker = Worker(rank, size, line, done, model, batch_size, servers, torch.device(device))
    contenders = {name: worker.step_of(name) for name in names}
    line.send("ready")
    for number in range(rounds + 1):  # the first is for warming up
        order = [*names[number % len(names) :], *names[: number % len(names)]]
        spent = {name: Spent() for name in names}
        took_s: dict[str, float] = {}
        for name in order:
            step = contenders[name]
            counts = spent[name].counted() if counts_checks else nullcontext()
            hooks = unhooked() if name in (*PLAIN, DDP) else nullcontext()
            with worker.turn_of(name), hooks, unchecked() if name.endswith(UNCHECKED) else counts:
                step()  # brings the contender's memory into caches
                worker.finish()
                worker.meet()
                spent[name].total_s = 0.0
                start_s, core_start_s = time.perf_counter(), time.thread_time()
                for _ in range(steps):
                    step()
                worker.finish()
                took_s[name] = (time.perf_counter() - start_s) / steps
                if counts_checks:
                    is_plain = name in PLAIN
                    core_s = time.thread_time() - core_start_s if is_plain else spent[name].total_s
                    took_s[name] = core_s / steps
            worker.meet()
        line.send(took_s)


def measure(
    *,
    model: str,
    batch_size: int,
    workers: int,
    servers: int,
    names: Sequence[str],
    rounds: int,
    steps: int,
    counts_checks: bool,
    device: str,
) -> list[dict[str, float]]:
    """Seconds a step of each contender, one dictionary a round: the mean over workers."""
    context = multiprocessing.get_context("spawn")
    done = context.RawArray("q", workers)
    groups = {name: Servers(servers) for name in names if name.startswith("ps-")}
    lines, processes = [], []
    for rank in range(workers):
        mine, theirs = context.Pipe()
        arguments = (
            rank,
            workers,
            theirs,
            done,
            model,
            batch_size,
            groups,
            names,
            rounds,
            steps,
            counts_checks,
            device,
        )
        processes.append(context.Process(target=work, args=arguments, daemon=True))
        lines.append(mine)
    for process in processes:
        process.start()
    for _ in range(sum(name.removesuffix(UNCHECKED) in MEETING_BY_ADDRESS for name in names)):
        addresses = [line.recv() for line in lines]
        for line in lines:
            line.send(addresses)
    for line in lines:
        assert line.recv() == "ready"
    found = [[line.recv() for line in lines] for _ in range(rounds + 1)][1:]
    for process in processes:
        process.join()
    return [{name: statistics.mean(took[name] for took in everyone) for name in names} for everyone in found]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    lower, middle, upper = statistics.quantiles(values, n=4)
    return lower, middle, upper


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Between which of the values the median is in 95 of 100 such samples: a binomial's bounds, nearly a normal's."""
    ordered, spread = sorted(values), 1.96 * math.sqrt(len(values)) / 2
    below = max(0, math.floor(len(values) / 2 - spread))
    return ordered[below], ordered[len(values) - 1 - below]


def table_of(found: Sequence[dict[str, float]], title: str) -> Table:
    columns = ("contender", "us a step", "beside", "of its rate", "quartiles", "us more", "its 95 % interval")
    table = Table(*columns, title=title)
    names = list(found[0])
    for name in names:
        took = statistics.median(one[name] for one in found)
        beside = [other for mine, other in COMPARISONS if mine == name and other in names] or ["-"]
        for other in beside:
            if other == "-":
                table.add_row(name, f"{took * 1e6:,.0f}", *"-----")
                continue
            lower, middle, upper = quartiles([one[other] / one[name] for one in found])
            more = [(one[name] - one[other]) * 1e6 for one in found]
            low, high = interval_of_median(more)
            ratios = f"{middle:.3f}", f"{lower:.3f} to {upper:.3f}"
            difference = f"{statistics.median(more):,.0f}", f"{low:,.0f} to {high:,.0f}"
            table.add_row(name, f"{took * 1e6:,.0f}", other, *ratios, *difference)
    return table


def checks_of(found: Sequence[dict[str, float]], title: str) -> Table:
    """Of the core's time that a plain step takes, what checks take beside it."""
    table = Table("contender", "us in checks a step", "of a plain step, %", "its 95 % interval", title=title)
    for name in found[0]:
        if name not in PLAIN:
            shares = [100 * one[name] / one["plain"] for one in found]
            low, high = interval_of_median(shares)
            took = statistics.median(one[name] for one in found) * 1e6
            table.add_row(name, f"{took:,.0f}", f"{statistics.median(shares):.2f}", f"{low:.2f} to {high:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--batch-size", type=int, default=100, help="samples a worker and step")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=60, help="steps of a window")
    parser.add_argument("--servers", type=int, default=1, help="parameter servers of the ps strategies")
    parser.add_argument("--checks", action="store_true", help="the core's time of plain steps, and of others' checks")
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=(*PLAIN, *STRATEGIES))
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: all workers share the first GPU"
    )
    args = parser.parse_args()
    names = [name for name in CONTENDERS if name in args.only]
    workload = {name: getattr(args, name) for name in ("model", "batch_size", "workers", "servers")}
    windows = {"rounds": args.rounds, "steps": args.steps}
    found = measure(**workload, **windows, names=names, counts_checks=args.checks, device=args.device)
    on = f"{args.model}, batch {args.batch_size}, {args.workers} workers on {args.device}"
    title = f"{on}, {args.rounds} rounds of {args.steps} steps"
    table = checks_of(found, title) if args.checks else table_of(found, title)
    tell([table], {"workload": workload, "seconds_a_step": found})


if __name__ == "__main__":
    main()
