"""What small operations by Horovod's interface cost: 1,000 tensors of 1 KB beside one of 1 MB, on one machine.

Forms take turns within a round, so that a busy machine slows all of them alike; shown are medians over rounds and their
ratios to those of one tensor: the time of the slowest rank, and what the busiest rank takes of a core, which what else
runs on the machine hardly changes. Calls of functions that do nothing show what Python itself takes of a thousand, and
plain backward what is the script's own where backward is timed.

    python benchmarks/horovod_fusion.py --workers 2
    python benchmarks/horovod_fusion.py --workers 2 --profile   # where rank 0's time goes, with one operation a tensor
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from report import tell
from rich.table import Table

import paceline.horovod.torch as hvd

NUM_TENSORS, NUM_FLOATS = 1000, 256
ONE, NOTHING, EACH, NEW, GROUP, OPTIMIZER, FRESH, PLAIN, BACKWARD = (
    "one tensor of 1 MB",
    "1,000 calls that do nothing, and as many waits",
    "1,000 operations in place",
    "1,000 operations with new results",
    "one group of 1,000",
    "an optimizer of 1,000 parameters",
    "the same, after `zero_grad()` has set all to none",
    "plain backward of 1,000 parameters, after that",
    "the same with the optimizer's hooks, and its reduction",
)


class Form(NamedTuple):
    """One way to have a step's tensors reduced."""

    run: Callable[[], None]
    prepare: Callable[[], None] = lambda: None
    """What backward does before; it is not timed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        be_rank(num_rounds=args.rounds, is_profiled=args.profile)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.workers)]
    sys.exit(subprocess.run([*command, *sys.argv, "--rank"], check=False).returncode)


def be_rank(*, num_rounds: int, is_profiled: bool) -> None:
    hvd.init()
    torch.set_num_threads(1)
    forms = make_forms()
    for _ in range(3):
        for form in forms.values():
            form.prepare()
            form.run()
    if is_profiled:
        profile(forms[EACH].run, num_rounds=num_rounds)
        return
    times_s: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for _ in range(num_rounds):
        for name, form in forms.items():
            form.prepare()
            hvd.barrier()
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            form.run()
            times_s[name].append((time.perf_counter() - began_s, time.process_time() - began_cpu_s))
    everyone = hvd.allgather_object(times_s)
    if hvd.rank() == 0:
        show(everyone)


def make_forms() -> dict[str, Form]:
    whole = torch.ones(NUM_TENSORS * NUM_FLOATS)
    parts = [torch.ones(NUM_FLOATS) for _ in range(NUM_TENSORS)]
    names = [f"part {number}" for number in range(NUM_TENSORS)]
    new_names = [f"new {number}" for number in range(NUM_TENSORS)]
    parameters = [torch.nn.Parameter(torch.ones(NUM_FLOATS)) for _ in range(NUM_TENSORS)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0))
    gradients = [torch.zeros(NUM_FLOATS) for _ in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def each() -> None:
        handles = [hvd.allreduce_async_(part, name=name) for part, name in zip(parts, names, strict=True)]
        for handle in handles:
            hvd.synchronize(handle)

    def new() -> None:
        handles = [hvd.allreduce_async(part, name=name) for part, name in zip(parts, new_names, strict=True)]
        for handle in handles:
            hvd.synchronize(handle)

    def nothing() -> None:
        handles = [_ask_nothing(part, name=name) for part, name in zip(parts, names, strict=True)]
        for handle in handles:
            _wait_for_nothing(handle)

    plain = [torch.nn.Parameter(torch.ones(NUM_FLOATS)) for _ in range(NUM_TENSORS)]

    def forget_plain() -> None:
        for parameter in plain:
            parameter.grad = None

    def backward() -> None:
        torch.cat(tuple(parameters)).sum().backward()
        optimizer.synchronize()

    def put_gradients() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    return {
        ONE: Form(lambda: hvd.synchronize(hvd.allreduce_async_(whole, name="whole"))),
        NOTHING: Form(nothing),
        EACH: Form(each),
        NEW: Form(new),
        GROUP: Form(lambda: hvd.synchronize(hvd.grouped_allreduce_async_(parts, name="group"))),
        OPTIMIZER: Form(lambda: optimizer.synchronize()),
        FRESH: Form(lambda: optimizer.synchronize(), prepare=put_gradients),
        PLAIN: Form(lambda: torch.cat(tuple(plain)).sum().backward(), prepare=forget_plain),
        BACKWARD: Form(backward, prepare=lambda: optimizer.zero_grad()),
    }


def _ask_nothing(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> object:
    """What `allreduce_async_` would cost if it did nothing but return a handle."""
    return object()


def _wait_for_nothing(handle: object) -> None:
    return None


def profile(form: Callable[[], None], *, num_rounds: int) -> None:
    profiler = cProfile.Profile()
    for _ in range(num_rounds):
        hvd.barrier()
        if hvd.rank() == 0:
            profiler.enable()
        form()
        profiler.disable()
    if hvd.rank() == 0:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


def show(everyone: list[dict[str, list[tuple[float, float]]]]) -> None:
    table = Table("form", "ms", "times one tensor", "ms of a core", "times one tensor")
    medians_s = {name: (median_s(everyone, name, 0), median_s(everyone, name, 1)) for name in everyone[0]}
    first_s, first_cpu_s = medians_s[ONE]
    for name, (took_s, cpu_s) in medians_s.items():
        cells = (took_s * 1e3, took_s / first_s, cpu_s * 1e3, cpu_s / first_cpu_s)
        table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    tell([table], {"medians_s": medians_s})


def median_s(everyone: list[dict[str, list[tuple[float, float]]]], name: str, place: int) -> float:
    """Over rounds, each of which took as long as its slowest rank."""
    rounds = zip(*([each[place] for each in theirs[name]] for theirs in everyone), strict=True)
    slowest_s: list[float] = [max(ranks) for ranks in rounds]
    return statistics.median(slowest_s)


if __name__ == "__main__":
    main()
