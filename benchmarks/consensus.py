"""How many exchanges bring workers near their mean, and how long these take on slow links: what density buys and costs.

    python benchmarks/consensus.py --workers 16

Real exchanges of 100 kB on the virtual engine: workers on a host each, links of 100 Mbit/s and 100 us. Each begins
with other random numbers, and nobody trains; a run ends where at most 1 % of the distance to the mean is left.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from functools import partial
from pathlib import Path

import torch
from report import tell
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.strategies.gossip import Gossip
from paceline.topology import BaseK, Chain, Everybody, Exponential, OnePeerExponential, Ring, Topology, Torus

TOPOLOGIES = (Everybody(), Exponential(), Torus(), Ring(), Chain(), OnePeerExponential(), BaseK())
LEFT = 0.01
NUM_ELEMENTS, NUM_SEEN = 25_000, 500


def mix(num_steps: int, out: Path) -> None:
    """Steps of a learning rate of 0, so that exchanges are all that changes. Keeps some numbers after each."""
    worker = paceline.init()
    model = nn.Linear(1, NUM_ELEMENTS, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(torch.zeros(worker.size, 1)))
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    with torch.no_grad():
        model.weight.copy_(torch.randn(NUM_ELEMENTS, 1, generator=torch.Generator().manual_seed(worker.rank)))
    seen = [model.weight.detach()[:NUM_SEEN].clone()]
    for _ in range(num_steps):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            seen.append(model.weight.detach()[:NUM_SEEN].clone())
    torch.save(torch.stack(seen), out / f"{worker.rank}.pt")


def at_most(topology: Topology, workers: int) -> int:
    """Steps after which no more than that is left, whatever the beginning."""
    kept = topology.contraction(workers)
    periods = 1 if kept < 1e-9 else math.ceil(math.log(LEFT) / math.log(kept))
    return periods * topology.period(workers)


def measure(topology: Topology, workers: int) -> tuple[int, float]:
    """Steps until then, and the seconds that these took on the cluster."""
    cluster = Cluster(
        hosts=(Hosts(count=workers, bandwidth_gbit_per_s=0.1, latency_us=100.0),), compute=Compute(step_s=0.0)
    )
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        result = paceline.run(
            partial(mix, at_most(topology, workers), out),
            strategy=Gossip(topology=topology, own_scores=False),
            workers=workers,
            engine="virtual",
            cluster=cluster,
            out=out / "run",
        )
        seen = torch.stack([torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(workers)])
        distances = (seen - seen.mean(0)).flatten(2).norm(dim=2).norm(dim=0)
        reached = int((distances <= LEFT * distances[0]).nonzero()[0])
        return reached, max(each.time_s for each in result.steps if each.step <= reached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    workers = parser.parse_args().workers
    table = Table(title=f"{workers} workers")
    table.add_column("topology")
    for title in ("most models a worker sends", "distance kept a step", "steps", "ms a step", "seconds"):
        table.add_column(title, justify="right")
    for topology in TOPOLOGIES:
        steps, took_s = measure(topology, workers)
        kept = topology.contraction(workers) ** (1 / topology.period(workers))
        sent = str(topology.num_sent(workers)[1])
        each = f"{took_s / steps * 1e3:.1f}"
        table.add_row(f"`{topology}`", sent, f"{kept:.3f}" if kept > 1e-3 else "0", str(steps), each, f"{took_s:.2f}")
        print(*(str(cell) for cell in (topology, steps, took_s)), flush=True)
    tell([table], {"workers": workers, "bytes": 4 * NUM_ELEMENTS, "left": LEFT})


if __name__ == "__main__":
    main()
