"""Accuracy at equal samples: rounds of local steps beside all-reduce. One table a command.

    python recipes/low_bandwidth/table.py
    python recipes/low_bandwidth/table.py --dataset cifar10 --lr 0.02

Each row is the mean and the range over the seeds, on the virtual engine.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

import paceline
from paceline.running.launch import Quiet
from paceline.running.result import Result

SCRIPT = Path(__file__).with_name("train.py")


def rows(every: int, steps: int) -> dict[str, tuple[str, dict[str, int]]]:
    return {
        "all-reduce": ("all-reduce", {}),
        "local-sgd": ("local-sgd", {"every": every}),
        "post-local, from half of the steps on": ("post-local", {"every": every, "post_local_from": steps // 2}),
        "slowmo": ("slowmo", {"every": every}),
        "des-loc": ("des-loc", {"every": every, "variance_every": 0}),
        "diloco": ("diloco", {"every": every}),
        "noloco": ("noloco", {"every": every}),
    }


def trial(strategy: str, options: dict[str, int], seed: int, args: argparse.Namespace, out: Path) -> Result:
    numbers = {"steps": args.steps, "batch-size": args.batch_size, "lr": args.lr}
    script = ["--dataset", args.dataset, "--model", args.model]
    script += [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    return paceline.run(
        SCRIPT,
        arguments=script,
        strategy=strategy,
        options=options,
        workers=args.workers,
        engine="virtual",
        cluster=args.cluster,
        seed=seed,
        out=out,
        watcher=Quiet(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--every", type=int, default=50, help="local steps of a round")
    parser.add_argument("--steps", type=int, default=300, help="of each worker")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cluster", default="lab-1gbe")
    args = parser.parse_args()
    table = Table("strategy", "accuracy", "range", "MB a worker moved", "seconds on the cluster")
    with tempfile.TemporaryDirectory() as directory:
        for label, (strategy, options) in rows(args.every, args.steps).items():
            results = [
                trial(strategy, options, seed, args, Path(directory) / f"{label}-{seed}") for seed in range(args.seeds)
            ]
            found = [result.metrics["accuracy"] for result in results]
            moved = sum(record.moved_bytes for record in results[0].steps) / args.workers / 1e6
            took_s = fmean(result.training_time_s for result in results)
            spread = f"{min(found):.4f} to {max(found):.4f}"
            table.add_row(label, f"{fmean(found):.4f}", spread, f"{moved:.1f}", f"{took_s:.1f}")
            print(label, *(f"{value:.4f}" for value in found), flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
