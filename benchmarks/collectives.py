"""Seconds a collective of Paceline takes among processes of this host, beside gloo's and beside the memory's limit.

All contenders run one after another in every round, on the same ranks: Paceline on a tensor from `allocate`, Paceline
on a plain tensor, and gloo over loopback on the same plain tensor. The table gives medians over the rounds.

The limit of an all-reduce in place: n ranks hold M bytes each, and each rank reduces its n-th of them. It reads its
part of every rank's tensor and writes the result to every rank, M bytes read and M written. All ranks together:

    limit = 2 n M / bandwidth

where `bandwidth` is what as many processes as cores read and write together per second over memory of n M bytes in
all, in the fastest round of the fastest of torch's copy, add and scaling in place (which writes only what it has read,
as the all-reduce does); it is measured in the same rounds. Small tensors are far from it: two processes need
microseconds to hear of each other. The other operations are shown beside gloo alone. In them M is what a rank holds of
the whole: each rank gives M / n to all_gather, gets M / n from reduce_scatter, and sends M / n to each rank in
all_to_all.

    python benchmarks/collectives.py --ranks 2 4 8 --sizes 4KB 12KB 64KB 1MB 8MB 45MB 256MB
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers.workload import num_cores, run_in_processes, share_cores
from report import tell
from rich.table import Table
from torch import Tensor

from paceline.comm.base import Collective
from paceline.comm.shared_memory.block import BlockAddress
from paceline.comm.shared_memory.collective import SharedMemoryCollective

PEER = "gloo"
UNITS = {"KB": 1_000, "MB": 1_000_000}
DEFAULT_SIZES = ("4KB", "12KB", "64KB", "1MB", "8MB", "45MB", "256MB")
MAX_REPETITIONS = 2000
NUM_KERNELS = 3
Call = Callable[[], object]
Make = Callable[[Tensor], Call]
"""Given one rank's tensor, the call that is timed."""


@dataclass(frozen=True)
class Row:
    """One size at one number of ranks."""

    num_ranks: int
    num_bytes: int
    bandwidth_bytes_per_s: float
    seconds: Mapping[str, Sequence[float]]
    """One a round, by contender."""

    def limit_s(self) -> float:
        return 2 * self.num_ranks * self.num_bytes / self.bandwidth_bytes_per_s


def paceline_calls(collective: Collective) -> dict[str, Make]:
    """Every operation under Paceline."""

    def parts(tensor: Tensor) -> list[Tensor]:
        return list(tensor.chunk(collective.size))

    return {
        "all_reduce": lambda tensor: lambda: collective.all_reduce(tensor).wait(),
        "broadcast": lambda tensor: lambda: collective.broadcast(tensor),
        "all_gather": lambda tensor: lambda: collective.all_gather(parts(tensor)[0]),
        "reduce_scatter": lambda tensor: lambda: collective.reduce_scatter(parts(tensor)),
        "all_to_all": lambda tensor: lambda: collective.all_to_all(parts(tensor)),
    }


def gloo_calls(num_ranks: int) -> dict[str, Make]:
    """Every operation under gloo, into memory that is there already."""

    def all_gather(tensor: Tensor) -> Call:
        part, out = tensor.chunk(num_ranks)[0], torch.empty_like(tensor)
        return lambda: dist.all_gather_into_tensor(out, part)

    def reduce_scatter(tensor: Tensor) -> Call:
        out = torch.empty_like(tensor.chunk(num_ranks)[0])
        return lambda: dist.reduce_scatter_tensor(out, tensor)

    def all_to_all(tensor: Tensor) -> Call:
        out = torch.empty_like(tensor)
        return lambda: dist.all_to_all_single(out, tensor)

    return {
        "all_reduce": lambda tensor: lambda: dist.all_reduce(tensor),
        "broadcast": lambda tensor: lambda: dist.broadcast(tensor, src=0),
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
    }


def measure_rank(
    rank: int,
    num_ranks: int,
    meeting_point: str,
    operation: str,
    sizes_bytes: Sequence[int],
    num_rounds: int,
    window_s: float,
    results: SimpleQueue[Any],
) -> None:
    """What each rank runs; rank 0 hands out one row a size."""
    share_cores(num_ranks)
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=num_ranks)
    collective = connect(rank, num_ranks)
    try:
        allocated = collective.allocate(max(sizes_bytes)).view(torch.float32)
        plain = torch.empty_like(allocated).zero_()
        for num_bytes in sizes_bytes:
            ours, theirs = paceline_calls(collective)[operation], gloo_calls(num_ranks)[operation]
            views = [memory[: num_bytes // plain.itemsize] for memory in (allocated, plain)]
            calls = {"allocated": ours(views[0]), "plain": ours(views[1]), PEER: theirs(views[1])}
            row = measure(calls, num_bytes, num_rounds=num_rounds, window_s=window_s)
            if rank == 0:
                results.put(asdict(row))
    finally:
        collective.close()
        dist.destroy_process_group()


def connect(rank: int, num_ranks: int) -> Collective:
    """Paceline's collective; the addresses go round by gloo."""
    control = SharedMemoryCollective.prepare()
    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, astuple(control.address))
    addresses = [BlockAddress(*numbers) for numbers in found]
    return SharedMemoryCollective(rank=rank, addresses=addresses, control=control)


def measure(calls: Mapping[str, Call], num_bytes: int, *, num_rounds: int, window_s: float) -> Row:
    """All contenders in each round, and the memory's bandwidth."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_movers = min(num_ranks, num_cores())
    kernels: Sequence[Kernel | None] = [None] * NUM_KERNELS
    if rank < num_movers:
        kernels = memory_kernels(num_ranks * num_bytes // num_movers)
    repetitions = {name: agree_on_repetitions(call, window_s) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    bandwidths: list[float] = []
    for number in range(num_rounds):
        for name, call in calls.items():
            seconds[name].append(slowest_rank(call, repetitions[name]))
        bandwidths.append(max(measure_bandwidth(kernel, window_s) for kernel in kernels))
        if rank == 0:
            times = "  ".join(f"{name} {values[-1] * 1e6:,.0f} us" for name, values in seconds.items())
            print(
                f"{num_ranks} ranks, {num_bytes:,} bytes, round {number + 1}/{num_rounds}: {times}  "
                f"{bandwidths[-1] / 1e9:.1f} GB/s",
                file=sys.stderr,
            )
    return Row(num_ranks, num_bytes, max(bandwidths), seconds)


@dataclass(frozen=True)
class Kernel:
    """A pass over memory, and what it reads and writes."""

    call: Call
    num_bytes: int


def memory_kernels(footprint_bytes: int) -> list[Kernel]:
    """Copy, add and scaling in place, each over so much memory in all."""
    [whole] = touched(footprint_bytes, 1)
    x, y = touched(footprint_bytes, 2)
    a, b, c = touched(footprint_bytes, 3)
    return [
        Kernel(lambda: y.copy_(x), 2 * x.nbytes),
        Kernel(lambda: torch.add(a, b, out=c), 3 * a.nbytes),
        Kernel(lambda: whole.mul_(2.0), 2 * whole.nbytes),
    ]


def touched(footprint_bytes: int, num_tensors: int) -> list[Tensor]:
    """So many tensors, so large together. Written to: memory fresh from the kernel is one page of zeros, in cache."""
    return [torch.empty(max(16, footprint_bytes // num_tensors // 4)).zero_() for _ in range(num_tensors)]


def measure_bandwidth(kernel: Kernel | None, window_s: float) -> float:
    """Bytes that all ranks with a kernel read and write per second, at the same time."""
    dist.barrier()
    moved_bytes, began_s = 0, time.perf_counter()
    while kernel is not None and time.perf_counter() - began_s < window_s:
        kernel.call()
        moved_bytes += kernel.num_bytes
    rate = torch.tensor([moved_bytes / (time.perf_counter() - began_s)], dtype=torch.float64)
    dist.all_reduce(rate)
    return rate.item()


def agree_on_repetitions(call: Call, window_s: float) -> int:
    """So many calls as fill the window, by the slowest rank's clock, after a warm-up."""
    call()
    once_s = slowest_rank(call, 3)
    return max(1, min(MAX_REPETITIONS, round(window_s / once_s)))


def slowest_rank(call: Call, repetitions: int) -> float:
    """Seconds a call on the rank that took longest."""
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(repetitions):
        call()
    elapsed_s = torch.tensor([(time.perf_counter() - began_s) / repetitions], dtype=torch.float64)
    dist.all_reduce(elapsed_s, op=dist.ReduceOp.MAX)
    return elapsed_s.item()


def table_of(rows: Sequence[Row], operation: str) -> Table:
    table = Table(title=f"{operation}, times in us: median (lowest to highest)", title_justify="left")
    has_limit = operation == "all_reduce"
    headings = ["ranks", "size", "contender", "time", "gloo / its", *(["limit", "of limit"] if has_limit else [])]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "contender" else "right", no_wrap=True)
    for row in rows:
        medians_s = {name: statistics.median(values) for name, values in row.seconds.items()}
        for name, values in row.seconds.items():
            limit = [f"{row.limit_s() * 1e6:,.0f}", f"{row.limit_s() / medians_s[name]:.2f}"] if has_limit else []
            time_us = f"{medians_s[name] * 1e6:,.0f} ({min(values) * 1e6:,.0f} to {max(values) * 1e6:,.0f})"
            ratio = f"{medians_s[PEER] / medians_s[name]:.2f}"
            table.add_row(str(row.num_ranks), size_text(row.num_bytes), name, time_us, ratio, *limit)
    return table


def size_bytes(text: str) -> int:
    """`12KB` as bytes, a multiple of what every number of ranks divides."""
    found = re.fullmatch(r"(\d+)(KB|MB)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 12KB or 45MB")
    return int(found[1]) * UNITS[found[2]]


def size_text(num_bytes: int) -> str:
    return f"{num_bytes // UNITS['MB']} MB" if num_bytes >= UNITS["MB"] else f"{num_bytes // UNITS['KB']} KB"


def run(operation: str, num_ranks: int, sizes_bytes: Sequence[int], *, num_rounds: int, window_s: float) -> list[Row]:
    """One world of so many ranks, all sizes."""
    with tempfile.TemporaryDirectory(prefix="collectives-") as folder:
        meeting_point = (Path(folder) / "meeting-point").as_uri()
        arguments = (meeting_point, operation, sizes_bytes, num_rounds, window_s)
        rows: list[Any] = run_in_processes(measure_rank, num_ranks, *arguments)
        return [Row(**row) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    operations = list(gloo_calls(1))
    parser.add_argument("--operation", choices=operations, default="all_reduce")
    sizes = [size_bytes(text) for text in DEFAULT_SIZES]
    parser.add_argument("--sizes", type=size_bytes, nargs="+", default=sizes, help=", ".join(DEFAULT_SIZES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-seconds", type=float, default=0.1, help="length of each timed window")
    args = parser.parse_args()
    rows = []
    for num_ranks in args.ranks:
        rows += run(args.operation, num_ranks, args.sizes, num_rounds=args.rounds, window_s=args.window_seconds)
    facts = {"operation": args.operation, "rows": [asdict(row) for row in rows]}
    tell([table_of(rows, args.operation)], facts)


if __name__ == "__main__":
    main()
