"""What a worker that computes ten times slower costs the others under `ad-psgd`, its neighbours and those farther away.

    python benchmarks/slow_worker.py

16 workers in a ring on the virtual engine, a host each, 10 ms a gradient; the last one takes 100 ms in the second run.
Counted are the steps that each has ended within the time, before all meet to stop.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from report import tell
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster, Compute, Hosts

MARGIN = 2.0
"""All meet to stop a while before the time that a run may take."""


def train() -> None:
    worker = paceline.init()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(256 * worker.size, 8)), batch_size=1)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    while True:
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def steps_of(workers: int, *, strategy: str, slowness: float, seconds: float) -> list[int]:
    """Of each worker, by rank."""
    fast = Hosts(count=workers - 1, bandwidth_gbit_per_s=0.1, latency_us=100.0)
    slow = replace(fast, name="slow", count=1, speed=1 / slowness)
    compute = Compute(step_s=0.01, distribution="log-normal", variation=0.1)
    with tempfile.TemporaryDirectory() as out:
        result = paceline.run(
            train,
            strategy=strategy,
            workers=workers,
            engine="virtual",
            cluster=Cluster(hosts=(fast, slow), compute=compute),
            max_time_s=MARGIN * seconds,
            out=Path(out) / "run",
        )
        counted = Counter(step.worker for step in result.steps if step.time_s <= seconds)
        if result.training_time_s < seconds:
            raise RuntimeError(f"the run ended after {result.training_time_s:.2f} s, before the {seconds} s that count")
    return [counted[rank] for rank in range(workers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--slowness", type=float, default=10.0)
    args = parser.parse_args()
    table = Table()
    table.add_column("strategy")
    for title in ("steps", "the slow one", "its neighbours lose", "the others lose", "most"):
        table.add_column(title, justify="right")
    for strategy in ("ad-psgd", "gossip:own_scores=false"):
        before = steps_of(args.workers, strategy=strategy, slowness=1.0, seconds=args.seconds)
        after = steps_of(args.workers, strategy=strategy, slowness=args.slowness, seconds=args.seconds)
        lost = [1 - now / then for now, then in zip(after, before, strict=True)]
        near, others = [lost[0], lost[-2]], lost[1:-2]
        table.add_row(
            f"`{strategy.partition(':')[0]}`",
            f"{sum(before) / len(before):.0f}",
            str(after[-1]),
            f"{sum(near) / 2:.1%}",
            f"{sum(others) / len(others):.1%}",
            f"{max(others):.1%}",
        )
    tell([table], {"workers": args.workers, "seconds": args.seconds, "slowness": args.slowness})


if __name__ == "__main__":
    main()
