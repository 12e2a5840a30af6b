"""Rows a second of a table on servers: ours, one of `torch.distributed.rpc`, and a plain gather in memory.

Two workers and two servers on this host, one thread each. A batch is 4,096 unique keys of rows that the servers have,
64 float32 each, of a table with 200,000 rows, or with `--hashed` of one with 2^63. `pull` is a forward pass without
gradients; `pull and push` a whole step of plain SGD: under Paceline with the layer, backward and the update of a small
dense part, under rpc one call a server and way. The gather is `index_select` and `index_add_` of as many rows by the
same number of processes at once. With `--tensorflow PYTHON`, an environment's with tensorflow and tf-keras, its
ParameterServerStrategy does the same in as many processes, whose steps come ten at a time, so that what counts is the
time of them all.

    python benchmarks/rows.py --tensorflow PYTHON
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import tell
from rich.table import Table
from rounds import ratio_of
from torch import Tensor, nn
from torch.distributed import rpc
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.nn import ShardedEmbedding
from paceline.running.launch import Quiet

NUM_ROWS, DIM, BATCH, WORKERS, SERVERS, WARMUP, LR = 200_000, 64, 4096, 2, 2, 5, 0.1
WAYS = ("pull", "pull and push")
Way = Callable[[Tensor], object]
Rates = Mapping[str, float]


def rates_of(rank: int, steps: int, pull: Way, step: Way) -> Rates:
    """One worker's rows a second; the median step counts."""
    generator = torch.Generator().manual_seed(rank)
    found = {}
    for name, way in zip(WAYS, (pull, step), strict=True):
        seconds = []
        for _ in range(WARMUP + steps):
            keys = torch.randperm(NUM_ROWS, generator=generator)[:BATCH]
            began_s = time.perf_counter()
            way(keys)
            seconds.append(time.perf_counter() - began_s)
        found[name] = BATCH / statistics.median(seconds[WARMUP:])
    return found


class Model(nn.Module):
    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.rows = ShardedEmbedding(num_rows, DIM, optimizer=f"sgd:lr={LR}", name="rows")
        self.dense = nn.Parameter(torch.zeros(16 * SERVERS))

    def forward(self, keys: Tensor) -> Tensor:
        rows: Tensor = self.rows(keys)
        return rows.sum() + self.dense.sum()


def train(steps: int, num_rows: int, directory: str) -> None:
    """A worker of ours."""
    torch.set_num_threads(1)
    worker, model = paceline.init(), Model(num_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    num_steps = 2 * (WARMUP + steps) + NUM_ROWS // BATCH + 1
    loader = DataLoader(TensorDataset(torch.arange(num_steps * WORKERS)), batch_size=1)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    table, turns = model.rows, iter(loader)

    def step(keys: Tensor) -> None:
        next(turns)
        optimizer.zero_grad()
        model(keys).backward()
        optimizer.step()

    for keys in torch.arange(NUM_ROWS).split(BATCH):  # servers make the rows
        step(keys)
    with torch.no_grad():
        for keys in torch.arange(NUM_ROWS).split(BATCH):  # and workers have read them before
            table(keys)
    rates = rates_of(worker.rank, steps, torch.no_grad()(table), step)
    (Path(directory) / f"{worker.rank}.json").write_text(json.dumps(rates))


def ours(steps: int, num_rows: int) -> Rates:
    with tempfile.TemporaryDirectory() as directory:
        paceline.run(
            partial(train, steps, num_rows, directory),
            strategy="ps-asp",
            options={"servers": SERVERS},
            workers=WORKERS,
            device="cpu",
            watcher=Quiet(),
            out=f"{directory}/run",
        )
        return summed([json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(WORKERS)])


def summed(rates: list[Rates]) -> Rates:
    return {name: sum(each[name] for each in rates) for name in rates[0]}


ROWS = torch.empty(0)
"""Of a server of rpc, or a process of the gather."""


def make_rows() -> None:
    global ROWS
    ROWS = torch.randn(NUM_ROWS, DIM)


def read_rows(keys: Tensor) -> Tensor:
    return ROWS.index_select(0, keys)


def add_rows(keys: Tensor, values: Tensor) -> None:
    ROWS.index_add_(0, keys, values, alpha=-LR)


def call_servers(function: Callable[..., Any], keys: Tensor, *values: Tensor) -> list[Any]:
    """Each with the rows whose keys are its own."""
    owner, calls = keys % SERVERS, []
    for server in range(SERVERS):
        own = owner == server
        arguments = (keys[own], *(each[own] for each in values))
        calls.append(rpc.rpc_async(f"server-{server}", function, args=arguments))
    return [call.wait() for call in calls]


def pull_by_rpc(keys: Tensor) -> Tensor:
    rows, owner = torch.empty(len(keys), DIM), keys % SERVERS
    for server, part in enumerate(call_servers(read_rows, keys)):
        rows[owner == server] = part
    return rows


def step_by_rpc(keys: Tensor) -> None:
    call_servers(add_rows, keys, torch.ones_like(pull_by_rpc(keys)))


def step_by_gather(keys: Tensor) -> None:
    add_rows(keys, torch.ones_like(read_rows(keys)))


def rpc_process(rank: int, steps: int, meeting: str, results: Any) -> None:
    torch.set_num_threads(1)
    make_rows()
    name = f"worker-{rank}" if rank < WORKERS else f"server-{rank - WORKERS}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}")
    rpc.init_rpc(name, rank=rank, world_size=WORKERS + SERVERS, rpc_backend_options=options)
    if rank < WORKERS:
        results.put(rates_of(rank, steps, pull_by_rpc, step_by_rpc))
    rpc.shutdown()


def gather_process(rank: int, steps: int, meeting: str, results: Any) -> None:
    torch.set_num_threads(1)
    make_rows()
    results.put(rates_of(rank, steps, read_rows, step_by_gather))


def in_processes(target: Callable[..., None], count: int, steps: int) -> Rates:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        meeting = f"{directory}/meeting"
        processes = [context.Process(target=target, args=(rank, steps, meeting, results)) for rank in range(count)]
        for process in processes:
            process.start()
        rates = summed([results.get(timeout=600) for _ in range(WORKERS)])
        for process in processes:
            process.join()
    return rates


def of_tensorflow(python: str, steps: int) -> Rates:
    """
    Raises:
        SystemExit: it failed; with the end of what it said.
    """
    arguments = map(str, (NUM_ROWS, DIM, BATCH, WORKERS, SERVERS, steps))
    command = [python, "-m", "peers.tensorflow_rows", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"TensorFlow failed:\n{done.stderr[-3000:]}")
    rates: Rates = json.loads(done.stdout.splitlines()[-1])
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each kind, that count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hashed", action="store_true", help="our table has 2^63 rows, too many for an array of them")
    parser.add_argument(
        "--tensorflow", type=os.path.abspath, help="a Python with tensorflow and tf-keras", metavar="PYTHON"
    )
    args = parser.parse_args()
    num_rows = 2**63 if args.hashed else NUM_ROWS
    contenders: dict[str, Callable[[], Rates]] = {
        "Paceline, ps-asp": partial(ours, args.steps, num_rows),
        "torch.distributed.rpc": partial(in_processes, rpc_process, WORKERS + SERVERS, args.steps),
        "gather in memory": partial(in_processes, gather_process, WORKERS, args.steps),
    }
    if args.tensorflow:
        contenders["TensorFlow, parameter servers"] = partial(of_tensorflow, args.tensorflow, args.steps)
    rounds = [{name: contender() for name, contender in contenders.items()} for _ in range(args.rounds)]
    table = Table(
        title=f"thousand rows a second, {os.cpu_count()} cores, medians of {args.rounds}; ours within a round",
        title_justify="left",
    )
    table.add_column("")
    for way in WAYS:
        table.add_column(way, justify="right")
        table.add_column("ours", justify="right")
    own, *_ = contenders
    for name in contenders:
        cells = []
        for way in WAYS:
            rates = [one[name][way] for one in rounds]
            cells += [f"{statistics.median(rates) / 1000:,.0f}", ratio_of([one[own][way] for one in rounds], rates)]
        table.add_row(name, *cells)
    tell([table], {"workload": vars(args), "rounds": rounds})


if __name__ == "__main__":
    main()
