"""What each Paceline worker runs in overlap.py: so many steps of real training."""

from __future__ import annotations

import argparse

from peers.workload import make_model, make_optimizer, train_step
from throughput import FixedBatches, whole
from torch.utils.data import DataLoader, Subset

import paceline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    worker = paceline.init()
    model = make_model(args.model)
    optimizer = make_optimizer(model)
    data = Subset(FixedBatches(args.batch_size, seed=worker.rank), range(args.steps * args.batch_size * worker.size))
    loader = DataLoader(data, batch_size=args.batch_size, collate_fn=whole)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for batch in loader:
        train_step(model, optimizer, batch)


main()
