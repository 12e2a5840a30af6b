"""What a client's turn takes besides its training: fed-avg on the virtual engine beside a bare loop, in turns.

    python benchmarks/client_overhead.py

The 2NN of the FedAvg paper (McMahan et al., 2017), 100 clients of 60 samples, ten a round, batches of ten.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from report import tell
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline

NUM_CLIENTS, SAMPLES_EACH, BATCH_SIZE, FRACTION = 100, 60, 10, 0.1
A_ROUND = round(NUM_CLIENTS * FRACTION)


def data_of(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 784, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 10, (num_samples,), generator=generator))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def bare_s(num_turns: int) -> float:
    """A turn's seconds, in a loop that does nothing but train."""
    model = network()
    optimizer, loader = SGD(model.parameters(), lr=0.1), DataLoader(data_of(SAMPLES_EACH), BATCH_SIZE, shuffle=True)
    began_s = time.perf_counter()
    for _ in range(num_turns):
        for x, y in loader:
            step(model, optimizer, x, y)
    return (time.perf_counter() - began_s) / num_turns


def federated_s(num_turns: int) -> float:
    """A turn's seconds, from the first one's first batch to that of the turn behind the last one that counts."""
    begun_s: list[float] = []

    def script() -> None:
        worker, model = paceline.init(), network()
        loader = DataLoader(data_of(NUM_CLIENTS * SAMPLES_EACH), BATCH_SIZE, shuffle=True)
        model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader)
        for _ in range(num_turns + A_ROUND):
            for number, (x, y) in enumerate(loader):
                if not number:
                    begun_s.append(time.perf_counter())
                step(model, optimizer, x, y)

    with tempfile.TemporaryDirectory() as out:
        paceline.run(
            script,
            strategy="fed-avg",
            options={"clients": NUM_CLIENTS, "fraction": FRACTION},
            workers=1,
            engine="virtual",
            cluster="lab-1gbe",
            max_steps=num_turns // A_ROUND + 1,  # the run's end is in none of those that count
            out=Path(out) / "run",
        )
    assert len(begun_s) == num_turns + A_ROUND, f"{len(begun_s)} turns were played"
    return (begun_s[num_turns] - begun_s[0]) / num_turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200, help="of clients in each measurement, a multiple of ten")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if args.turns < A_ROUND or args.turns % A_ROUND:
        parser.error(f"--turns must be a multiple of {A_ROUND}, the clients of a round, not {args.turns}")
    torch.set_num_threads(1)
    bare_s(args.turns), federated_s(args.turns)  # the first ones of a process are slower
    pairs = [(bare_s(args.turns), federated_s(args.turns)) for _ in range(args.repeats)]
    more_ms = sorted((federated - bare) * 1e3 for bare, federated in pairs)
    table = Table("a client's turn", "ms, median", "least", "most")
    for name, times_ms in (
        ("bare", [bare * 1e3 for bare, _ in pairs]),
        ("fed-avg", [federated * 1e3 for _, federated in pairs]),
        ("more", more_ms),
    ):
        found = (statistics.median(times_ms), min(times_ms), max(times_ms))
        table.add_row(name, *(f"{each:.2f}" for each in found))
    tell([table], {"turns": args.turns, "more_ms": statistics.median(more_ms)})


if __name__ == "__main__":
    main()
