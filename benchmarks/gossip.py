"""How far workers are from their mean under several topologies: real training on the virtual engine, then mixing alone.

    python benchmarks/gossip.py --figures docs/figures

Each run trains a linear classifier of digits; from half of the steps on the learning rate is 0, so that what is left is
the exchange. One worker's distance is that of its parameters to the mean model's.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch
from plots import Series, decay_chart
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.data import collate, load
from paceline.strategies.gossip import Gossip
from paceline.topology import BaseK, Chain, Exponential, OnePeerExponential, Ring, Topology, Torus
from paceline.training.differing import CONSENSUS_DISTANCE

TOPOLOGIES = (Chain(), Ring(), Torus(), Exponential(), OnePeerExponential(), BaseK())


def train(num_steps: int) -> None:
    worker = paceline.init()
    digits, model = load("digits"), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(digits.train, batch_size=4, shuffle=True, collate_fn=collate)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    worker.evaluation(lambda model: {})
    done = 0
    while done < num_steps:
        for images, labels in loader:
            optimizer.param_groups[0]["lr"] = 0.05 if done < num_steps // 2 else 0.0
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            done += 1


def distances(topology: Topology, workers: int, num_steps: int) -> list[tuple[float, float]]:
    """After each step."""
    strategy = Gossip(topology=topology, own_scores=False)
    with tempfile.TemporaryDirectory() as directory:
        result = paceline.run(
            partial(train, num_steps),
            strategy=strategy,
            workers=workers,
            max_steps=num_steps,
            eval_every=2,
            engine="virtual",
            cluster="commodity-10gbe",
            out=Path(directory) / "run",
        )
        found = [record for record in result.logged if record.name == CONSENSUS_DISTANCE]
    return [(float(record.iteration), record.value) for record in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw distance against steps")
    arguments = parser.parse_args()
    workers, num_steps = arguments.workers, arguments.steps
    print("| topology | models sent a step | distance kept a period | distance while training | at the end |")
    print("|---|--:|--:|--:|--:|")
    series = []
    for topology in TOPOLOGIES:
        found = distances(topology, workers, num_steps)
        settled = [value for step, value in found if num_steps // 4 <= step <= num_steps // 2]
        sent, kept = topology.num_sent(workers)[0], topology.contraction(workers)
        mean = sum(settled) / len(settled)
        print(f"| `{topology}` | {sent:.3g} | {kept:.4f} | {mean:.3g} | {found[-1][1]:.1e} |", flush=True)
        series.append(Series(str(topology), [(step, value) for step, value in found if value > 1e-7]))
    if arguments.figures:
        chart = decay_chart(
            series,
            title=f"{workers} workers: training, and from step {num_steps // 2} on mixing alone",
            x_label="step",
            y_label="distance to the mean model",
        )
        (arguments.figures / "gossip.svg").write_text(chart, encoding="utf-8")


if __name__ == "__main__":
    main()
