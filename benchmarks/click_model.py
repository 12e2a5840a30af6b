"""The click model with its rows on servers beside the same model all of which is all-reduced, at 100 Mbit/s.

    python benchmarks/click_model.py
    python benchmarks/click_model.py --lines 15000 --rows 16384 262144 --workers 4
    sudo python benchmarks/click_model.py --namespaces --lines 15000

Real gradients on simulated hosts, or with `--namespaces` real processes in network namespaces (Linux and root needed;
see namespaces.py). A worker is on each host, and a server beside it where there are any, so that nobody has more links
than the others. Categories are hashed to as many rows under all contenders (`--rows` of the recipe). A run ends where
the model's log-loss on lines held out is within 1 % of the planted model's, or with its lines.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from namespaces import network
from report import tell
from rich.table import Table

import paceline
from paceline.cluster.description import Cluster, Communication, Hosts, Servers
from paceline.running.launch import Quiet
from paceline.running.result import Result

SCRIPT = Path(__file__).parents[1] / "recipes" / "embeddings" / "clicks.py"
PACELINE = str(Path(sys.executable).parent / "paceline")
RATE_MBIT, TARGET, TIMEOUT_S = 100.0, 0.01, 3600.0
NUM_WARMUP_STEPS = 2


class Contender(NamedTuple):
    title: str
    strategy: str
    is_dense: bool = False


CONTENDERS = {
    "dense": Contender("all of it all-reduced", "all-reduce", is_dense=True),
    "asp": Contender("rows by asp, the rest all-reduced", "all-reduce:servers={workers}:rows=asp"),
    "bsp": Contender("rows by bsp, the rest all-reduced", "all-reduce:servers={workers}:rows=bsp"),
    "ps-asp": Contender("all of it by ps-asp", "ps-asp:servers={workers}"),
}
Train = Callable[[str, Sequence[str], Path], Result]
"""Under a strategy, with the script's arguments and a directory for the result."""


@contextmanager
def on_simulated_hosts(args: argparse.Namespace) -> Iterator[tuple[Train, Path]]:
    def train(strategy: str, arguments: Sequence[str], out: Path) -> Result:
        return paceline.run(
            SCRIPT,
            strategy=strategy,
            workers=args.workers,
            arguments=arguments,
            engine="virtual",
            cluster=cluster_of(args.workers),
            eval_every=f"{args.eval_every}samples",
            target=f"excess<={TARGET}",
            seed=args.seed,
            watcher=Quiet(),
            out=out,
        )

    with tempfile.TemporaryDirectory() as directory:
        yield train, Path(directory)


@contextmanager
def on_namespaces(args: argparse.Namespace) -> Iterator[tuple[Train, Path]]:
    with network(args.workers) as net:
        net.limit(RATE_MBIT)
        ray = net.start_ray()

        def train(strategy: str, arguments: Sequence[str], out: Path) -> Result:
            command = [PACELINE, "run", str(SCRIPT), "--strategy", strategy, "--workers", str(args.workers)]
            command += ["--address", ray, "--device", "cpu", "--seed", str(args.seed), "--out", str(out)]
            command += ["--eval-every", f"{args.eval_every}samples", "--target", f"excess<={TARGET}"]
            net.run(net.hosts[0], [*command, "--", *arguments], timeout_s=TIMEOUT_S)
            return Result.open(out)

        yield train, net.directory


def cluster_of(workers: int) -> Cluster:
    """What messages and requests take besides the links is that of real hosts; see docs/virtual.md."""
    hosts = Hosts(count=workers, cores=4, gflop_per_s=8.0, bandwidth_gbit_per_s=RATE_MBIT / 1e3, latency_us=100.0)
    costs = Communication(operation_us=300.0, message_us=300.0, request_us=300.0)
    return Cluster(hosts=(hosts,), servers=Servers(placement="with workers", request_us=300.0), communication=costs)


def row_of(title: str, result: Result) -> list[str]:
    steps = [step for step in result.steps if step.step > NUM_WARMUP_STEPS]
    step_s = statistics.median(step.compute_s + step.communication_s + step.waiting_s for step in steps)
    moved_bytes = statistics.median(step.moved_bytes for step in steps)
    last = result.evaluations[-1]
    excess, is_reached = last.metrics["excess"], last.metrics["excess"] <= TARGET
    numbers = [f"{step_s * 1e3:.1f}", f"{moved_bytes / 1e6:.2f}", f"{100 * excess:.2f}", f"{last.time_s:.1f}"]
    return [title, *numbers, "yes" if is_reached else "no"]


def table_of(rows: int, args: argparse.Namespace, train: Train, directory: Path) -> Table:
    table = Table(title=f"{rows:,} rows, {args.workers} workers, {args.batch_size} lines each")
    table.add_column("")
    for column in ("ms a step", "MB a step", "excess in %", "after s", "within 1 %"):
        table.add_column(column, justify="right")
    for name in args.contenders:
        title, strategy, is_dense = CONTENDERS[name]
        arguments = ["--rows", str(rows), "--lines", str(args.lines), "--batch-size", str(args.batch_size)]
        arguments += ["--dense"] if is_dense else []
        result = train(strategy.format(workers=args.workers), arguments, directory / f"{rows}-{name}")
        table.add_row(*row_of(title, result))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2**18], help="that the categories share")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128, help="lines of a step and worker")
    parser.add_argument("--lines", type=int, default=400_000)
    parser.add_argument("--eval-every", type=int, default=20_000, help="lines from one evaluation to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--namespaces", action="store_true", help="real processes on hosts of this machine")
    args = parser.parse_args()
    with on_namespaces(args) if args.namespaces else on_simulated_hosts(args) as (train, directory):
        tables = [table_of(rows, args, train, directory) for rows in args.rows]
    facts = {"mbit_per_s": RATE_MBIT, "lines": args.lines, "seed": args.seed, "namespaces": args.namespaces}
    tell(tables, facts)


if __name__ == "__main__":
    main()
