"""What each Paceline worker runs in network.py, prediction.py and slow_links.py: so many steps of hardly more than the
exchange.

Every worker ends after its own steps, so that under an asynchronous strategy all of them do as many, whether they share
a host with a server or not.
"""

from __future__ import annotations

import argparse
import time

import torch
from peers.exchange import GradientSource, make_optimizer
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sleep-s", type=float, default=0.0, help="sleep so long each step, as if computing elsewhere")
    parser.add_argument("--width", type=int, help="of resnet18, other than its own")
    args = parser.parse_args()
    worker = paceline.init()
    model = GradientSource(args.model, width=args.width)
    optimizer = make_optimizer(model)
    loader = DataLoader(TensorDataset(torch.ones(args.steps * worker.size)), batch_size=1)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for (batch,) in loader:
        if args.sleep_s:
            time.sleep(args.sleep_s)
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()


main()
