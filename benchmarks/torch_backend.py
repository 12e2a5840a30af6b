"""Samples per second of one plain DistributedDataParallel script under the backends `gloo` and `paceline`.

The script differs in the name of the backend only. The contenders run one after another in every round, beside the
same training without communication, so that a change of the machine's mood meets all of them; the table gives medians
over the rounds, and of the ratios within a round, with their spread.

    python benchmarks/torch_backend.py --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

from peers import ceiling, ddp_gloo
from report import tell
from rich.table import Table
from rounds import Measure, ratio_of, run_rounds

CONTENDERS: dict[str, Measure] = {
    "ceiling": ceiling.measure,
    "gloo": partial(ddp_gloo.measure, backend="gloo"),
    "paceline": partial(ddp_gloo.measure, backend="paceline"),
}
BATCH_SIZES = {"convnet": 100, "resnet18": 4}


def table_of(rates: Mapping[str, Sequence[float]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("backend", "samples/s", "lowest", "highest", "of ceiling", "of gloo"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for name, values in rates.items():
        table.add_row(
            name,
            f"{statistics.median(values):,.1f}",
            f"{min(values):,.1f}",
            f"{max(values):,.1f}",
            ratio_of(values, rates["ceiling"]),
            ratio_of(values, rates["gloo"]),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=BATCH_SIZES, default=list(BATCH_SIZES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each timed window")
    parser.add_argument("--warmup-seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    measured, tables = [], []
    for model in args.models:
        workload = {
            "model": model,
            "num_workers": args.workers,
            "batch_size": BATCH_SIZES[model],
            "seconds": args.seconds,
            "warmup_seconds": args.warmup_seconds,
        }
        rates = run_rounds(CONTENDERS, num_rounds=args.rounds, **workload)
        title = f"{model}, batch {BATCH_SIZES[model]} a worker, {args.workers} workers, median of {args.rounds}"
        tables.append(table_of(rates, title))
        measured.append({"workload": workload, "samples_per_s": rates})
    tell(tables, {"measured": measured})


if __name__ == "__main__":
    main()
