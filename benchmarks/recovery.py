"""How long it takes from a worker's SIGKILL to the next committed step, on the conv net.

In each run all workers but one die, one after another, in the middle of a step.

    python benchmarks/recovery.py --workers 4 --runs 3
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from peers.workload import make_model, make_optimizer, train_step
from report import tell
from rich.table import Table
from throughput import FixedBatches, whole
from torch.utils.data import DataLoader

import paceline
from paceline.running.launch import Quiet

STEPS_APART = 40


def train(batch_size: int, directory: str) -> None:
    """What each worker runs; it writes down when its steps were committed."""
    worker = paceline.init()
    model = make_model("convnet")
    optimizer = make_optimizer(model)
    loader: Any = DataLoader(FixedBatches(batch_size, seed=worker.rank), batch_size=batch_size, collate_fn=whole)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    first = next(model.parameters())
    with open(f"{directory}/steps-{worker.rank}", "w", buffering=1) as file:
        for step, batch in enumerate(loader, start=1):
            if worker.rank and step == STEPS_APART * worker.rank:
                first.register_hook(partial(_die, f"{directory}/struck-{worker.rank}"))
            train_step(model, optimizer, batch)
            print(time.time(), file=file)


def _die(path: str, _: object) -> None:
    Path(path).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def recoveries_s(*, workers: int, batch_size: int) -> list[float]:
    """One for each death of a run."""
    with tempfile.TemporaryDirectory() as directory:
        paceline.run(
            partial(train, batch_size, directory),
            workers=workers,
            elastic=f"1:{workers}",
            global_batch="grow",
            max_steps=STEPS_APART * (workers + 1),
            out=f"{directory}/out",
            watcher=Quiet(),
        )
        committed_s = sorted(float(line) for line in Path(f"{directory}/steps-0").read_text().split())
        struck_s = [float(path.read_text()) for path in sorted(Path(directory).glob("struck-*"))]
    return [next(end_s for end_s in committed_s if end_s > when_s) - when_s for when_s in struck_s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    found = [each for _ in range(args.runs) for each in recoveries_s(workers=args.workers, batch_size=args.batch_size)]
    table = Table("deaths", "median s", "least", "most", title=f"SIGKILL to the next step, {args.workers} workers")
    table.add_row(str(len(found)), f"{statistics.median(found):.2f}", f"{min(found):.2f}", f"{max(found):.2f}")
    tell([table], {"workload": vars(args), "recovery_s": found})


if __name__ == "__main__":
    main()
