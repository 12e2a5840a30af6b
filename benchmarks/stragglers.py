"""What one slow worker costs the others, strategy by strategy.

Two workers train the one-layer conv net; in every second run worker 1 sleeps after each step so that its step takes
`--slowdown` times as long. Sleeping takes no core from worker 0, so that its loss of rate is the strategy's doing. The
table gives worker 0's steps per second without and with the straggler, and their ratio; medians over the rounds.

    python benchmarks/stragglers.py --slowdown 5
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from peers.workload import make_model, make_optimizer, train_step
from report import tell
from rich.table import Table
from throughput import FixedBatches, whole
from torch.utils.data import DataLoader

import paceline
from paceline.running.launch import Quiet

BATCH_SIZE = 100
STRATEGIES = ("all-reduce", "ps-bsp", "ps-ssp", "ps-asp")


def train(slowdown: float) -> None:
    """One worker; worker 1 makes each of its steps `slowdown` times as long."""
    worker = paceline.init()
    model = make_model("convnet")
    optimizer = make_optimizer(model)
    loader = DataLoader(FixedBatches(BATCH_SIZE, seed=worker.rank), batch_size=BATCH_SIZE, collate_fn=whole)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    while True:
        for batch in loader:
            began_s = time.perf_counter()
            train_step(model, optimizer, batch)
            if worker.rank == 1 and slowdown > 1:
                time.sleep((slowdown - 1) * (time.perf_counter() - began_s))


def rate(strategy: str, *, slowdown: float, seconds: float, warmup_seconds: float) -> float:
    """Steps per second of worker 0 after the warm-up."""
    with tempfile.TemporaryDirectory() as directory:
        result = paceline.run(
            partial(train, slowdown),
            strategy=strategy,
            workers=2,
            max_time_s=warmup_seconds + seconds,
            device="cpu",
            watcher=Quiet(),
            out=Path(directory) / "run",
        )
        times_s = [step.time_s for step in result.steps if step.worker == 0 and step.time_s > warmup_seconds]
        return (len(times_s) - 1) / (times_s[-1] - times_s[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slowdown", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--warmup-seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=STRATEGIES, default=list(STRATEGIES))
    args = parser.parse_args()
    window = {"seconds": args.seconds, "warmup_seconds": args.warmup_seconds}
    rates: dict[str, dict[str, list[float]]] = {name: {"alone": [], "with": []} for name in args.only}
    for number in range(args.rounds):
        for name in args.only:
            rates[name]["alone"].append(rate(name, slowdown=1.0, **window))
            rates[name]["with"].append(rate(name, slowdown=args.slowdown, **window))
            alone, slowed = rates[name]["alone"][-1], rates[name]["with"][-1]
            print(f"round {number + 1}/{args.rounds}  {name}: {alone:.0f} -> {slowed:.0f} steps/s", file=sys.stderr)
    table = Table(title=f"Worker 0 beside a worker {args.slowdown:g} times slower", title_justify="left")
    for heading in ("strategy", "steps/s", "with the straggler", "kept", "lowest", "highest"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for name, pair in rates.items():
        kept = [slowed / alone for alone, slowed in zip(pair["alone"], pair["with"], strict=True)]
        alone, slowed = statistics.median(pair["alone"]), statistics.median(pair["with"])
        spread = (f"{min(kept):.2f}", f"{max(kept):.2f}")
        table.add_row(name, f"{alone:.0f}", f"{slowed:.0f}", f"{statistics.median(kept):.2f}", *spread)
    tell([table], {"slowdown": args.slowdown, **window, "steps_per_s": rates})


if __name__ == "__main__":
    main()
