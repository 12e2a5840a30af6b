"""What it costs those who train when a server joins: while its process starts, while it is given copies of key ranges,
and when one is handed over to it.

In each run workers train for a while, then one more server is asked for (`paceline scale`), and the run ends some time
after the last key range has moved. Rates are the first worker's steps a second, as a share of its rate before. The
pause is its longest step around a handover, less the median of its steps before.

    python benchmarks/server_joins.py --workers 2 --servers 2 --ranges 4 --rounds 3 [--model resnet18 --batch-size 4]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from peers.deaths import committed
from recovery import train
from report import load_average, tell
from rich.table import Table

import paceline
from paceline.engines import requests
from paceline.running.launch import Quiet

ALONE_S = 5.0
"""So long they train before a server is asked for, once they are warm, and after the last move."""
NEAR_S = 0.5
LOOK_S = 0.01
WARM_STEPS = 20
MOVES = ("copying", "copied", "released", "taken_over")


class Found(NamedTuple):
    step_s: float
    """Before a server was asked for, in the median."""
    start_s: float
    """From then until it had joined."""
    start_rate: float
    """Meanwhile."""
    moves_s: float
    """From the first copy to the last move."""
    moves_rate: float
    copy_s: float
    """What one copy took, at most."""
    pause_s: float
    """At a handover, at most; not a number if the worker made no step after the first one."""


class Told(NamedTuple):
    when_s: float
    """When the event was seen here, in seconds since the epoch."""
    name: str
    details: dict[str, Any]


def one_run(args: argparse.Namespace, strategy: str) -> Found:
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(1) as pool:
        is_over = Event()
        asking = pool.submit(have_one_join, Path(directory), args.servers + 1, is_over)
        try:
            with contextlib.suppress(KeyboardInterrupt):  # which is how a run is told to stop
                paceline.run(
                    partial(train, args.batch_size, directory, args.model, dies=False),
                    workers=args.workers,
                    strategy=strategy,
                    options={"servers": args.servers, "replicas": args.replicas, "ranges": args.ranges},
                    elastic=f"1:{args.workers}",
                    out=f"{directory}/out",
                    watcher=Quiet(),
                )
        finally:
            is_over.set()
        return found_of([each.when_s for each in committed(Path(directory))], asking.result())


def found_of(ends_s: Sequence[float], told: Sequence[Told]) -> Found:
    """Args: when the first worker's steps ended; the run's events."""
    asked_s = next(each.when_s for each in told if each.name == "asked")
    joined_s = next(each.when_s for each in told if each.name == "server_joined")
    moves = [each for each in told if each.name in MOVES]
    began_s, ended_s = moves[0].when_s, moves[-1].when_s
    gaps = [(after_s, after_s - before_s) for before_s, after_s in pairwise(ends_s)]
    step_s = statistics.median(gap_s for when_s, gap_s in gaps if asked_s - ALONE_S < when_s < asked_s)

    def rate(from_s: float, to_s: float) -> float:
        return sum(from_s < end_s <= to_s for end_s in ends_s) / (to_s - from_s)

    before = rate(asked_s - ALONE_S, asked_s)
    handovers_s = [each.when_s for each in moves if each.name == "taken_over"]
    near_s = [
        gap_s
        for end_s, gap_s in gaps
        if any(end_s - gap_s <= each_s + NEAR_S and end_s >= each_s - NEAR_S for each_s in handovers_s)
    ]
    return Found(
        step_s=step_s,
        start_s=joined_s - asked_s,
        start_rate=rate(asked_s, joined_s) / before,
        moves_s=ended_s - began_s,
        moves_rate=rate(began_s, ended_s) / before,
        copy_s=max(each.details["took_s"] for each in moves if each.name == "copied"),
        pause_s=max(near_s, default=math.nan) - step_s,
    )


def have_one_join(directory: Path, servers: int, is_over: Event) -> list[Told]:
    """Ask for so many servers, note what the run says, and end it when nothing has moved for a while, or if that fails.

    Args:
        is_over: whether the run is. Raises RuntimeError where that comes first.
    """
    try:
        return _told_of_join(directory, servers, is_over)
    finally:
        if not is_over.is_set():
            requests.ask(directory / "out", {"do": "stop"})


def _told_of_join(directory: Path, servers: int, is_over: Event) -> list[Told]:
    out, steps, seen = directory / "out", directory / "steps-0", 0
    told: list[Told] = []

    def news() -> Iterator[Told]:
        nonlocal seen
        lines = (out / "events.jsonl").read_text().splitlines(keepends=True)[seen:]
        for line in (each for each in lines if each.endswith("\n")):
            seen += 1
            event = json.loads(line)
            yield Told(time.time(), event["name"], event["details"])

    def wait(seconds: float) -> None:
        if is_over.wait(seconds):
            raise RuntimeError(f"the run was over before a server had joined: {told}")

    while not steps.exists() or len(steps.read_text().splitlines()) < WARM_STEPS:
        wait(LOOK_S)
    wait(ALONE_S)
    told += news()
    told.append(Told(time.time(), "asked", {}))
    requests.ask(out, {"do": "scale", "servers": servers})
    while not _have_moved(told):
        wait(LOOK_S)
        told += news()
    return told


def _have_moved(told: Sequence[Told]) -> bool:
    names = {each.name for each in told}
    if "not_joined" in names or "failed" in names:
        raise RuntimeError(f"no server has joined: {told}")
    last_s = max((each.when_s for each in told if each.name in MOVES), default=0.0)
    return "taken_over" in names and time.time() - last_s > ALONE_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["ps-bsp", "ps-asp"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--ranges", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="convnet")
    args = parser.parse_args()
    title = f"A server joins; {args.workers} workers, {args.servers} servers, replicas={args.replicas}, {args.model}"
    columns = ("a step ms", "start s", "rate", "moves s", "rate", "a copy s", "pause at a handover s")
    table = Table("strategy", *columns, title=f"{title}; medians (least to most)")
    found: dict[str, list[Found]] = {strategy: [] for strategy in args.strategies}
    for _ in range(args.rounds):
        for strategy in args.strategies:
            found[strategy].append(one_run(args, strategy))
            print(strategy, found[strategy][-1], load_average(), file=sys.stderr, flush=True)
    for strategy, runs in found.items():
        values = [[1000 * run.step_s for run in runs], *zip(*(run[1:] for run in runs), strict=True)]
        row = [f"{statistics.median(each):.3g} ({min(each):.3g} to {max(each):.3g})" for each in values]
        table.add_row(strategy, *row)
    tell([table], {"workload": vars(args), "found": found, "load": load_average()})


if __name__ == "__main__":
    main()
