"""What each Paceline worker runs in soak.py: it says which process it is, and trains until it is stopped."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from peers.workload import make_model, make_optimizer, train_step
from throughput import FixedBatches, whole
from torch.utils.data import DataLoader

import paceline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--sleep-s", type=float, required=True, help="between steps, as if computing elsewhere")
    parser.add_argument("--workers", type=Path, required=True, help="a folder with each worker's process id")
    args = parser.parse_args()
    worker = paceline.init()
    model = make_model("convnet")
    optimizer = make_optimizer(model)
    data = FixedBatches(args.batch_size, seed=worker.rank)
    loader = DataLoader(data, batch_size=args.batch_size, collate_fn=whole)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    (args.workers / str(os.getpid())).touch()
    while True:
        for batch in loader:
            time.sleep(args.sleep_s)
            train_step(model, optimizer, batch)


main()
