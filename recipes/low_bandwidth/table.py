"""Accuracy at equal samples: rounds of local steps beside all-reduce. One table a command.

    python recipes/low_bandwidth/table.py
    python recipes/low_bandwidth/table.py --dataset cifar10 --lr 0.02

Each row is the mean and the range over the seeds, on the virtual engine. It is a study in `studies`, which goes on
where it was.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.lab.study import Study
from paceline.lab.variant import Variant

SCRIPT = Path(__file__).with_name("train.py")


def rows(every: int, steps: int) -> dict[str, str]:
    return {
        "all-reduce": "all-reduce",
        "local-sgd": f"local-sgd:every={every}",
        "post-local, from half of the steps on": f"post-local:every={every}:post_local_from={steps // 2}",
        "slowmo": f"slowmo:every={every}",
        "des-loc": f"des-loc:every={every}:variance_every=0",
        "diloco": f"diloco:every={every}",
        "diloco, outer momentum 0.6": f"diloco:every={every}:outer.momentum=0.6",
        "noloco": f"noloco:every={every}",
    }


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
    parser.add_argument("--only", nargs="+", metavar="NAME", help="strategies beside all-reduce")
    parser.add_argument("--cluster", default="lab-1gbe")
    parser.add_argument("--out", type=Path, help="by default studies/local-updates-DATASET-MODEL")
    args = parser.parse_args()
    numbers = {"steps": args.steps, "batch-size": args.batch_size, "lr": args.lr}
    script = ["--dataset", args.dataset, "--model", args.model]
    found = {
        label: text
        for label, text in rows(args.every, args.steps).items()
        if args.only is None or text.partition(":")[0] in ("all-reduce", *args.only)
    }
    study = Study.run(
        SCRIPT,
        strategies=list(found.values()),
        workers=[args.workers],
        seeds=args.seeds,
        engine="virtual",
        cluster=args.cluster,
        arguments=script + [text for name, value in numbers.items() for text in (f"--{name}", str(value))],
        out=args.out or Path("studies") / f"local-updates-{args.dataset}-{args.model}",
        retry_failed=True,
    ).require_finished()
    table = Table("strategy", "accuracy", "range", "below all-reduce", "MB a worker moved", "seconds on the cluster")
    trials = study.frames.trials
    synchronous = trials[trials["strategy"] == "all-reduce"]["last_metric"].mean()
    for label, text in found.items():
        own = trials[trials["strategy"] == Variant.parse(text).text]
        each = own["last_metric"]
        moved = own["moved_bytes"].iloc[0] / args.workers / 1e6
        below = f"{(synchronous - each.mean()) * 100:.2f} points"
        spread = f"{each.min():.4f} to {each.max():.4f}"
        table.add_row(
            label, f"{each.mean():.4f}", spread, below, f"{moved:.1f}", f"{own['training_time_s'].mean():.1f}"
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
