"""Least squares by broadcast, map, reduce and update on Ray's tasks, and what each iteration's time goes to.

    python recipes/mapreduce/least_squares.py --tasks 1,2,4
    python recipes/mapreduce/least_squares.py --tasks 1,2,4 --spark --svg speedup.svg --json speedup.json

Beside it: the same step by Paceline's all-reduce, algorithm reduce-broadcast, and with --spark on a local Spark.
README.md beside it says what is timed, and how.
"""

import argparse
import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_paceline
import on_ray
import on_spark
from accounting import WORTH_IT, flattens_at, mean_parts
from drawing import speedup_chart
from problem import Array, Problem, difference
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.engines.ray.nodes import connected
from paceline.errors import PacelineError

ROUNDING = 1e-10
"""How far parameters may be from serial descent's, as a part of the largest: sums in another order round otherwise."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=numbers, default=[1, 2, 4], metavar="N,N", help="numbers of map tasks")
    parser.add_argument("--rows", type=whole(1), default=30_000)
    parser.add_argument("--features", type=whole(1), default=100)
    parser.add_argument("--iterations", type=whole(on_paceline.NUM_WARM_UPS + 1), default=50)
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--address", help="of a Ray cluster; none: RAY_ADDRESS, else one starts here")
    parser.add_argument("--insecure", action="store_true", help="the cluster may be one that asks for no token")
    parser.add_argument("--no-paceline", action="store_true", help="leave out Paceline's own runs")
    parser.add_argument("--spark", action="store_true", help="on a local Spark, too")
    parser.add_argument("--svg", type=new_file, metavar="FILE", help="draw the speed-up")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write what was measured, in seconds and bytes")
    args = parser.parse_args()
    if max(args.tasks) > args.rows:
        parser.error(f"--tasks must lie between 1 and --rows, {args.rows}; {max(args.tasks)} does not")
    return args


def whole(least: int) -> Callable[[str], int]:
    """Reads a whole number from `least` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, not {text!r}")
        return int(text)

    return read


def numbers(text: str) -> list[int]:
    """`1,2,4` in order."""
    return sorted({whole(1)(part) for part in text.split(",")})


def new_file(text: str) -> Path:
    """Refused before anything is measured, where it could not be written then."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file in a directory that is there")
    return path


def main() -> None:
    args = parse_arguments()
    console = Console()
    lacking = on_spark.missing() if args.spark else None
    if lacking is not None:
        console.print(f"Spark is left out: {lacking} is not installed. `{on_spark.BRINGS_BOTH}` brings it.\n")
        args.spark = False
    problem = Problem.made(num_rows=args.rows, num_features=args.features, seed=args.seed)
    rate = problem.rate()
    settings: dict[str, Any] = {"rate": rate, "num_steps": args.iterations}
    with connected(args.address, insecure=args.insecure):
        on_ray.require_room(problem)
        serial, serial_s = on_ray.serial(problem, **settings)
        rows = [measure_ray(problem, num_tasks, serial, serial_s, settings) for num_tasks in args.tasks]
        console.print(ray_table(rows, serial_s, num_iterations=args.iterations))
        console.print(flattening(rows))
        peers = []
        if not args.no_paceline:
            peers = [measure_paceline(problem, num_workers, serial, settings) for num_workers in args.tasks]
            console.print(paceline_table(peers, serial_s))
    spark = [measure_spark(problem, num_tasks, serial, settings) for num_tasks in args.tasks] if args.spark else []
    if spark:
        console.print(spark_table(spark, serial_s))
    loss, start = problem.loss(serial), problem.loss(problem.start())
    console.print(f"loss {start:.4g} -> {loss:.4g}; all parameters equal serial descent's to {ROUNDING:g}")
    if args.svg:
        args.svg.write_text(speedup_chart({row["tasks"]: row["speedup"] for row in rows}), encoding="utf-8")
    if args.json:
        whole = {"rows": args.rows, "features": args.features, "iterations": args.iterations, "seed": args.seed}
        whole |= {"serial_s": serial_s, "ray": rows, "paceline": peers, "spark": spark}
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def checked(w: Array, serial: Array, name: str) -> float:
    """The difference from serial descent. Ends the command if it is more than rounding."""
    found = difference(w, serial)
    if not found <= ROUNDING:
        raise SystemExit(f"{name} differs from serial descent by {found:.1e}, which is more than rounding")
    return found


def measure_ray(
    problem: Problem, num_tasks: int, serial: Array, serial_s: float, settings: dict[str, Any]
) -> dict[str, Any]:
    w, iterations, moved_bytes = on_ray.descend(problem, num_tasks=num_tasks, **settings)
    parts = mean_parts(iterations)
    return {
        "tasks": num_tasks,
        "iteration_s": parts.wall_s,
        "computing_s": parts.computing_s,
        "bytes_s": parts.bytes_s,
        "latency_s": parts.latency_s,
        "straggler_s": parts.straggler_s,
        "moved_bytes": moved_bytes,
        "speedup": serial_s / parts.wall_s,
        "difference": checked(w, serial, f"Ray with {num_tasks} map tasks"),
    }


def measure_paceline(problem: Problem, num_workers: int, serial: Array, settings: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        w, parts = on_paceline.descend(problem, num_workers=num_workers, out=out, **settings)
    found = checked(w, serial, f"Paceline with {num_workers} workers")
    return {"workers": num_workers, "iteration_s": sum(parts.values()), **parts, "difference": found}


def measure_spark(problem: Problem, num_tasks: int, serial: Array, settings: dict[str, Any]) -> dict[str, Any]:
    w, iteration_s = on_spark.descend(problem, num_tasks=num_tasks, **settings)
    found = checked(w, serial, f"Spark with {num_tasks} map tasks")
    return {"tasks": num_tasks, "iteration_s": iteration_s, "difference": found}


def ray_table(rows: list[dict[str, Any]], serial_s: float, *, num_iterations: int) -> Table:
    table = empty_table(
        f"Ray's tasks: ms an iteration, of the middle half of {num_iterations}; serial {serial_s * 1e3:.2f}"
    )
    for name in ("tasks", "iteration", "computing", "bytes", "latency", "straggler", "KB", "speed-up", "off by"):
        table.add_column(name, justify="right")
    for row in rows:
        parts = [row[f"{name}_s"] for name in ("iteration", "computing", "bytes", "latency", "straggler")]
        kilobytes, off = f"{row['moved_bytes'] / 1e3:.1f}", f"{row['difference']:.0e}"
        table.add_row(str(row["tasks"]), *map(ms, parts), kilobytes, f"{row['speedup']:.2f}", off)
    return table


def flattening(rows: list[dict[str, Any]]) -> str:
    """Where more tasks stop to help, in words."""
    number = flattens_at({row["tasks"]: row["iteration_s"] for row in rows})
    if number is None:
        return f"The curve does not flatten up to --tasks {rows[-1]['tasks']}.\n"
    return f"The curve flattens at --tasks {number}: no larger number here saves {WORTH_IT:.0%} of an iteration.\n"


def paceline_table(rows: list[dict[str, Any]], serial_s: float) -> Table:
    table = empty_table("Paceline, all-reduce:algorithm=reduce-broadcast: ms a step")
    for name in ("workers", "step", "compute", "communication", "waiting", "speed-up", "off by"):
        table.add_column(name, justify="right")
    for row in rows:
        parts = [row[f"{name}_s"] for name in ("iteration", "compute", "communication", "waiting")]
        speedup = f"{serial_s / row['iteration_s']:.2f}"
        table.add_row(str(row["workers"]), *map(ms, parts), speedup, f"{row['difference']:.0e}")
    return table


def spark_table(rows: list[dict[str, Any]], serial_s: float) -> Table:
    table = empty_table("local Spark: ms an iteration")
    for name in ("tasks", "iteration", "speed-up", "off by"):
        table.add_column(name, justify="right")
    for row in rows:
        speedup = f"{serial_s / row['iteration_s']:.2f}"
        table.add_row(str(row["tasks"]), ms(row["iteration_s"]), speedup, f"{row['difference']:.0e}")
    return table


def empty_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


if __name__ == "__main__":
    try:
        main()
    except PacelineError as error:
        raise SystemExit(f"{error}") from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
