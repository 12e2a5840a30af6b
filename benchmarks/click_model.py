"""The click model with its rows on servers beside the same model all of which is all-reduced.

    python benchmarks/click_model.py
    python benchmarks/click_model.py --rows 16384 65536 --lines 60000

Real gradients on simulated hosts with links of 100 Mbit/s: a worker on each, and servers on the workers' hosts, so that
nobody has more links than the others. All contenders share as many rows (`--rows` of recipes/embeddings/clicks.py). A
run ends where the model's log-loss is within 1 % of the planted model's, or with its lines.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from report import tell
from rich.table import Table

import paceline
from paceline.cluster.description import Cluster, Communication, Hosts, Servers
from paceline.running.launch import Quiet
from paceline.running.result import Result

SCRIPT = Path(__file__).parents[1] / "recipes" / "embeddings" / "clicks.py"
TARGET = "excess<=0.01"


class Contender(NamedTuple):
    title: str
    strategy: str
    is_dense: bool = False


CONTENDERS = (
    Contender("all of it all-reduced", "all-reduce", is_dense=True),
    Contender("rows by asp, the rest all-reduced", "all-reduce:servers={workers}:rows=asp"),
    Contender("rows by bsp, the rest all-reduced", "all-reduce:servers={workers}:rows=bsp"),
    Contender("all of it by ps-asp", "ps-asp:servers={workers}"),
)


def cluster_of(workers: int) -> Cluster:
    hosts = Hosts(count=workers, cores=4, gflop_per_s=8.0, bandwidth_gbit_per_s=0.1, latency_us=100.0)
    # What a small message and a request take of real hosts (docs/virtual.md).
    costs = Communication(operation_us=300.0, message_us=300.0, request_us=300.0)
    return Cluster(hosts=(hosts,), servers=Servers(placement="with workers", request_us=300.0), communication=costs)


def run(contender: Contender, *, rows: int, args: argparse.Namespace, out: Path) -> Result:
    arguments = ["--rows", str(rows)]
    for name in ("lines", "passes", "batch_size"):
        arguments += [f"--{name.replace(chr(95), chr(45))}", str(getattr(args, name))]
    return paceline.run(
        SCRIPT,
        strategy=contender.strategy.format(workers=args.workers),
        workers=args.workers,
        arguments=[*arguments, *(["--dense"] if contender.is_dense else [])],
        engine="virtual",
        cluster=cluster_of(args.workers),
        eval_every=f"{args.eval_every}samples",
        target=TARGET,
        seed=args.seed,
        watcher=Quiet(),
        out=out,
    )


def row_of(result: Result, workers: int) -> list[str]:
    steps = result.steps
    step_s = statistics.median(step.compute_s + step.communication_s + step.waiting_s for step in steps)
    moved = statistics.median(step.moved_bytes for step in steps)
    excess = [(each.metrics["excess"], each.time_s) for each in result.evaluations]
    best, time_s = excess[-1]
    reached = f"{time_s:.1f}" if best <= 0.01 else "-"
    return [f"{step_s * 1e3:.1f}", f"{moved / 1e6:.2f}", f"{time_s:.1f}", f"{100 * best:.2f}", reached]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2**14, 2**18], help="that the categories share")
    parser.add_argument("--workers", type=int, default=2, help="each with a server, where there are any")
    parser.add_argument("--lines", type=int, default=250_000)
    parser.add_argument("--batch-size", type=int, default=128, help="lines of a step and worker")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--eval-every", type=int, default=20_000, help="lines from one evaluation to the next")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tables = [table_of(rows, args) for rows in args.rows]
    tell(tables, {"target": TARGET, "lines": args.lines, "passes": args.passes, "workers": args.workers})


def table_of(rows: int, args: argparse.Namespace) -> Table:
    table = Table(title=f"{rows:,} rows, {args.workers} workers, 100 Mbit/s")
    table.add_column("")
    for column in ("ms a step", "MB a step", "s in all", "excess in %", "s to 1 %"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as directory:
        for number, contender in enumerate(CONTENDERS):
            result = run(contender, rows=rows, args=args, out=Path(directory) / str(number))
            table.add_row(contender.title, *row_of(result, args.workers))
    return table


if __name__ == "__main__":
    main()
