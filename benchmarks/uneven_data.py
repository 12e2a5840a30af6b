"""Accuracy where each worker's data differ, under gossip of several kinds: the order of RelaySGD's table.

    python benchmarks/uneven_data.py
    python benchmarks/uneven_data.py --epochs 20 --seeds 3
    python benchmarks/uneven_data.py --epochs 20 --rates 0.2

16 workers with data sets of their own (recipes/low_bandwidth/uneven.py) train the conv net on MNIST, or on CIFAR-10, on
the virtual engine, each method with the best of three learning rates, found on a seed that is not judged; or all with
one. They are studies in `studies`, which go on where they were.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from report import tell
from rich.table import Table

from paceline.lab.study import Study
from paceline.lab.variant import Variant

SCRIPT = Path(__file__).parents[1] / "recipes" / "low_bandwidth" / "uneven.py"
METHODS = {
    "everybody": "all-reduce",
    "D-PSGD, ring": "gossip:topology=ring:own_scores=false",
    "SGP, one-peer exponential": "sgp:topology=one-peer:own_scores=false",
    "RelaySGD, chain": "relay:topology=chain:own_scores=false",
    "RelaySGD, tree": "relay:topology=tree:own_scores=false",
}


def conduct(alpha: float, args: argparse.Namespace) -> Study:
    rates = args.rates.split(",")
    rate = ["--lr", rates[0]] if len(rates) == 1 else []
    return Study.run(
        SCRIPT,
        strategies=list(METHODS.values()),
        workers=[args.workers],
        seeds=args.seeds,
        tune=() if rate else [f"lr={args.rates}"],
        engine="virtual",
        cluster="lab-1gbe",
        arguments=[
            *("--dataset", args.dataset, "--alpha", str(alpha)),
            *("--epochs", str(args.epochs), "--momentum", str(args.momentum), *rate),
        ],
        out=args.out / f"uneven-{args.dataset}-{alpha}",
        retry_failed=True,
    ).require_finished()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("mnist", "cifar10"), default="mnist")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0, 0.1, 0.01])
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--rates", default="0.05,0.2,0.5", help="learning rates to choose from")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("studies"))
    args = parser.parse_args()
    table = Table()
    table.add_column("method")
    studies = {alpha: conduct(alpha, args) for alpha in sorted(args.alphas)}
    for alpha in args.alphas:
        table.add_column(f"alpha {alpha:g}", justify="right")
    for name, text in METHODS.items():
        cells = []
        for alpha in args.alphas:
            rows = studies[alpha].frames.trials
            own = rows[rows["strategy"] == Variant.parse(text).text]
            found, rate = own["last_metric"], str(own["setting"].iloc[0]).removeprefix("lr=") or args.rates
            spread = f", {found.min():.1%} to {found.max():.1%}" if len(found) > 1 else ""
            cells.append(f"{found.mean():.1%} (rate {rate}{spread})")
        table.add_row(name, *cells)
    tell([table], {"workers": args.workers, "epochs": args.epochs, "seeds": args.seeds})


if __name__ == "__main__":
    main()
