"""How fast codecs encode and decode on one core, and how long an average of gradients takes through them over gloo,
between processes or hosts, beside torch's own hooks of DistributedDataParallel, in turns.

    python benchmarks/coding.py speed      # seconds for a GB of float32, what `seconds_per_gbyte` says
    python benchmarks/coding.py small      # ms that coding takes of a core in an average of 0.7 MB in 62 tensors
    python benchmarks/coding.py hooks      # milliseconds of an average of 33 MB of gradients, between two processes
    sudo python benchmarks/coding.py hooks --workers 8 --mbit 1000     # between hosts: network namespaces (Linux)
    python benchmarks/coding.py figure     # docs/figures/codecs.svg: predicted steps against bandwidth
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from namespaces import address_of, network
from plots import Series, line_chart
from report import tell
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from paceline.buckets import Bucket
from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.codec import FP16, Codec, Int8, JointCodec, PowerSGD, TensorCodec
from paceline.codec.costs import alone, coding_s, num_operations
from paceline.comm.process_group.collective import connect_gloo
from paceline.layout import Layout, TensorSpec, in_buckets
from paceline.memory import keep_freed_memory
from paceline.models import registry
from paceline.models.resnet18 import resnet18
from paceline.pieces import named
from paceline.planner import StepWork, predict
from paceline.strategies.coding import Coding
from paceline.strategies.exchange import Exchange

NUM_ELEMENTS = 1 << 20
SHAPES = [(1024, 1024)] * 8
NUM_ROUNDS = 24
SMALL_WORKERS = 8
GBIT_PER_S = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0)
STEP_S = 0.3
PORT, TIMEOUT_S = 29_500, 3600.0
FIGURE = Path(__file__).parents[1] / "docs/figures/codecs.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "small", "hooks", "figure"])
    parser.add_argument("--workers", type=int, default=2, help="processes that hooks are compared in")
    parser.add_argument("--mbit", type=float, help="of links between hosts, a worker each")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="that hooks are compared in")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    what = args.what
    if what == "speed":
        speed()
    elif what == "small":
        small()
    elif what == "figure":
        FIGURE.write_text(figure())
    elif args.rank is not None:
        first, own = address_of(1), address_of(args.rank + 1)
        compare(args.rank, args.workers, args.rounds, first, own, PORT)
    elif args.mbit is not None:
        among_hosts(args.workers, args.rounds, args.mbit)
    else:
        here = "127.0.0.1"
        mp.spawn(compare, args=(args.workers, args.rounds, here, here, _free_port()), nprocs=args.workers)


def among_hosts(workers: int, rounds: int, mbit: float) -> None:
    with network(workers) as net:
        net.limit(mbit)
        command = [sys.executable, str(Path(__file__).resolve()), "hooks", "--workers", str(workers)]
        command += ["--rounds", str(rounds)]
        ranks = {host: [*command, "--rank", str(rank)] for rank, host in enumerate(net.hosts)}
        print(net.run_all(ranks, timeout_s=TIMEOUT_S)[0].rstrip())


def low(taken_s: list[float]) -> float:
    """The 20th percentile: what it takes where nobody else has the core."""
    return statistics.quantiles(taken_s, n=5)[0]


# --- speed on one core -----------------------------------------------------------------------------------------------


def speed() -> None:
    torch.set_num_threads(1)
    print(f"{'codec':<12}{'bytes an element':>18}{'encode s/GB':>14}{'decode s/GB':>14}")
    for name, kind in sorted(named(Codec).items()):  # type: ignore[type-abstract]
        codec = kind()
        if isinstance(codec, TensorCodec):
            tensor = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(0))
            payload = codec.encode(tensor, seed=0)
            encode_s = timed(lambda: codec.encode(tensor, seed=0))  # noqa: B023
            decode_s = timed(lambda: codec.decode(payload, tensor, seed=0))  # noqa: B023
        elif isinstance(codec, JointCodec):
            tensor = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
            kept = codec.begin([(1024, 1024)], tensor, seed=0)
            encode_s, decode_s = timed(lambda: codec.average([tensor.clone()], kept, out=[tensor], mean=_nothing)), 0.0  # noqa: B023
        else:
            continue
        size = codec.num_bytes(tuple(tensor.shape)) / tensor.numel()
        gbyte = tensor.nbytes / 1e9
        print(f"{name:<12}{size:>18.3f}{encode_s / gbyte:>14.2f}{decode_s / gbyte:>14.2f}")


def small() -> None:
    """What a worker of eight codes of the gradients of ResNet-18 of width 8, without any message."""
    torch.set_num_threads(1)
    shapes = [tuple(parameter.shape) for parameter in resnet18(width=8).parameters()]
    count = sum(math.prod(shape) for shape in shapes)
    print(f"{'codec':<12}{'operations':>12}{'ms by bytes':>14}{'ms measured':>14}{'us more, each':>16}")
    for name, kind in sorted(named(Codec).items()):  # type: ignore[type-abstract]
        codec = PowerSGD(rank=4) if kind is PowerSGD else kind()
        if codec.adapts:
            continue
        operations, bytes_s = num_operations(codec, shapes, SMALL_WORKERS), coding_s(codec, count, SMALL_WORKERS)
        exchange = alone(codec, shapes if codec.shaped else [(count,)], SMALL_WORKERS)
        taken_s = timed(exchange)
        each_s = (taken_s - bytes_s) / operations
        print(f"{name:<12}{operations:>12.0f}{bytes_s * 1e3:>14.2f}{taken_s * 1e3:>14.2f}{each_s * 1e6:>16.1f}")


def timed(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(NUM_ROUNDS):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return low(taken)


def _nothing(tensor: Tensor) -> None:
    pass


# --- against bandwidth -----------------------------------------------------------------------------------------------


def figure() -> str:
    """Plans for the gradients of ResNet-18 on 8 hosts, which compute a step in 0.3 s."""
    model = registry.build("resnet18")
    parameters = list(model.parameters())
    work = StepWork(
        tensor_bytes=tuple(parameter.nbytes for parameter in parameters),
        tensor_shapes=tuple(tuple(parameter.shape) for parameter in parameters),
        samples=32,
    )
    series = []
    for codec in (None, "bf16", "int8", "one-bit", "top-k", "powersgd"):
        points = []
        for gbit_per_s in GBIT_PER_S:
            hosts = Hosts(count=8, bandwidth_gbit_per_s=gbit_per_s, latency_us=100.0)
            options = {} if codec is None else {"codec": codec}
            found = predict(
                Cluster(hosts=(hosts,), compute=Compute(step_s=STEP_S)),
                strategy="all-reduce",
                workers=8,
                work=work,
                options=options,
            )
            points.append((gbit_per_s, found.step_s))
        series.append(Series(codec or "none", points))
    return line_chart(
        series,
        title="A step of ResNet-18 on 8 hosts, all-reduce",
        x_label="bandwidth of a link, Gbit/s",
        y_label="predicted step, s",
    )


# --- beside torch's hooks --------------------------------------------------------------------------------------------


def compare(rank: int, size: int, rounds: int, first: str, own: str, port: int) -> None:
    """Args: first: address of the first worker. own: of this one."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as Paceline's workers do
    os.environ.update(MASTER_ADDR=first, MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    store = dist.TCPStore(first, port + 1, size, rank == 0, timeout=timedelta(seconds=60))
    collective = connect_gloo(store, rank=rank, size=size, address=own)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    pairs: list[tuple[str, Codec | None, Any, Any]] = [
        ("no codec", None, None, None),
        ("fp16:feedback=false", FP16(feedback=False), default_hooks.fp16_compress_hook, None),
        ("fp16", FP16(), None, None),
        ("int8:feedback=false", Int8(feedback=False), None, None),
        ("int8", Int8(), None, None),
        ("powersgd", PowerSGD(rank=4, start=0), powerSGD_hook.powerSGD_hook, state),
    ]
    table = Table()
    table.add_column("codec")
    for title in ("Paceline, ms", "torch, ms", "of torch's"):
        table.add_column(title, justify="right")
    for name, codec, hook, hook_state in pairs:
        mine = ours(collective, codec)
        theirs = torchs(hook, hook_state) if hook is not None or codec is None else None
        taken = [(mine(step), theirs() if theirs is not None else (math.nan, 0.0)) for step in range(rounds)]
        mine_s = low([own_s for own_s, _ in taken])
        theirs_s = low([both[0] for _, both in taken]) - low([both[1] for _, both in taken])
        cells = (f"{mine_s * 1e3:.0f}", f"{theirs_s * 1e3:.0f}", f"{mine_s / theirs_s:.2f}")
        table.add_row(f"`{name}`", *("" if cell == "nan" else cell for cell in cells))
        if rank == 0:
            print(name, *cells, flush=True)
    if rank == 0:
        tell([table], {"workers": size, "rounds": rounds})
    collective.close()
    dist.destroy_process_group()


def ours(collective: Any, codec: Codec | None) -> Callable[[int], float]:
    """What times an average of gradients that lie in a bucket."""
    layout: Layout = in_buckets(
        [TensorSpec(str(number), shape, torch.float32) for number, shape in enumerate(SHAPES)], bucket_bytes=1 << 30
    )
    (segment,) = layout.segments
    flat = segment.view(torch.zeros(layout.num_bytes, dtype=torch.uint8))
    end = flat.numel() - segment.tail
    bucket = Bucket(flat, flat[:end], flat[end:])
    coding = None if codec is None else Coding(codec)
    exchange = Exchange(collective, [bucket], coding=coding, layout=layout)

    def timed(step: int) -> float:
        bucket.values.normal_()
        bucket.flags.zero_()
        collective.barrier()
        began = time.perf_counter()
        exchange.start(0, step=step).wait()
        exchange.settle(is_applied=True)
        return time.perf_counter() - began

    return timed


class Tables(nn.Module):
    """Gradients that cost nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(table * g).sum() for table, g in zip(self.tables, gradients, strict=True)]).sum()


def torchs(hook: Any, state: Any) -> Callable[[], tuple[float, float]]:
    """What times a backward pass with an average, and one without."""
    gradients = [torch.randn(shape) for shape in SHAPES]
    model = nn.parallel.DistributedDataParallel(Tables(), bucket_cap_mb=64, gradient_as_bucket_view=True)
    if hook is not None:
        model.register_comm_hook(state, hook)

    def backward_s(is_synchronized: bool) -> float:
        model.require_backward_grad_sync = is_synchronized
        loss = model(gradients)
        dist.barrier()
        began = time.perf_counter()
        loss.backward()
        took_s = time.perf_counter() - began
        model.zero_grad()
        return took_s

    return lambda: (backward_s(True), backward_s(False))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
