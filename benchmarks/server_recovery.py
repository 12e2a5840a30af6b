"""How long training stands still when a server is killed that has a replica, and what replicas cost until then.

For each strategy and round, one run without replicas, one with them, and one with them in which a server is killed: the
time from SIGKILL to the end of the step that took longest around it, of the first worker's.

With --costs nobody is killed: the rate without replicas and `--elastic`, with either, and with both, and the bytes that
servers send each other a step (of the first worker's, as the kernel counts them on their connections; iproute2's `ss`).

    python benchmarks/server_recovery.py --workers 2 --servers 2 --rounds 3 [--costs]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

from peers.deaths import committed
from recovery import train
from report import load_average, tell
from rich.table import Table

import paceline
from paceline.running.launch import Quiet

NEAR_S = 2.0
WARM_STEPS = 20


def ends_of_steps(
    args: argparse.Namespace,
    strategy: str,
    *,
    replicas: int,
    kills: bool = False,
    elastic: bool = False,
    sent: list[float] | None = None,
) -> tuple[list[float], float]:
    """Of the first worker, in seconds since the epoch, and when a server was killed. What servers have sent each other
    a step is put into `sent`."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "out")
        struck_s: list[float] = []
        striking = Thread(target=_strike, args=(out, Path(directory, "steps-0"), args.steps // 2, struck_s))
        counting = Thread(target=_count_sent, args=(out, Path(directory, "steps-0"), args.steps, sent))
        if kills:
            striking.start()
        if sent is not None:
            counting.start()
        paceline.run(
            partial(train, args.batch_size, directory, args.model, dies=False),
            workers=args.workers,
            strategy=strategy,
            options={"servers": args.servers, "replicas": replicas},
            elastic=f"1:{args.workers}" if elastic else None,
            max_steps=args.steps * (1 if strategy == "ps-bsp" else args.workers),
            out=out,
            watcher=Quiet(),
        )
        if sent is not None:
            counting.join()
        if kills:
            striking.join()
            names = [json.loads(line)["name"] for line in (out / "events.jsonl").read_text().splitlines()]
            assert names.count("taken_over") == 1
        ends_s = [each.when_s for each in committed(Path(directory))]
    return ends_s, struck_s[0] if struck_s else 0.0


def _strike(out: Path, steps: Path, when: int, struck_s: list[float]) -> None:
    """Kill the last server once the first worker has taken so many steps."""
    _wait_for(steps, when)
    pids = _servers_of(out)
    struck_s.append(time.time())
    os.kill(pids[-1], signal.SIGKILL)


def _count_sent(out: Path, steps: Path, num_steps: int, sent: list[float]) -> None:
    """In the middle half of the run."""
    began = _wait_for(steps, num_steps // 4)
    before = bytes_between(_servers_of(out))
    ended = _wait_for(steps, 3 * num_steps // 4)
    sent.append((bytes_between(_servers_of(out)) - before) / (ended - began))


def _wait_for(steps: Path, when: int) -> int:
    """Until the first worker has taken so many steps; returns how many it has."""
    while not steps.exists() or (done := len(steps.read_text().splitlines())) < when:
        time.sleep(0.01)
    return done


def _servers_of(out: Path) -> list[int]:
    first = json.loads((out / "events.jsonl").read_text().splitlines()[0])
    return [pid for name, pid in sorted(first["details"]["pids"].items()) if name.startswith("server")]


def bytes_between(pids: Sequence[int]) -> int:
    """That these processes have sent each other over TCP."""
    said = subprocess.run(["ss", "-tinpHO"], check=True, capture_output=True, text=True).stdout
    ends: dict[str, tuple[str, int]] = {}  # by a socket's own address: the other end's, and what it has sent
    for line in said.splitlines():
        owner, sent = re.search(r"pid=(\d+)", line), re.search(r"bytes_sent:(\d+)", line)
        if owner and int(owner[1]) in pids:
            own, other = line.split()[3:5]
            ends[own] = other, int(sent[1]) if sent else 0
    return sum(sent for other, sent in ends.values() if other in ends)


def pause_s(ends_s: list[float], struck_s: float) -> float:
    gaps = [pair for pair in pairwise(ends_s) if pair[1] > struck_s and pair[0] < struck_s + NEAR_S]
    return max(gaps, key=lambda gap: gap[1] - gap[0])[1] - struck_s


def steps_per_s(ends_s: list[float]) -> float:
    return (len(ends_s) - 1 - WARM_STEPS) / (ends_s[-1] - ends_s[WARM_STEPS])


def measure(args: argparse.Namespace, strategy: str) -> dict[str, Any]:
    pauses_s, shares = [], []
    for _ in range(args.rounds):
        plain, _ = ends_of_steps(args, strategy, replicas=0)
        copied, _ = ends_of_steps(args, strategy, replicas=args.replicas)
        shares.append(steps_per_s(copied) / steps_per_s(plain))
        pauses_s.append(pause_s(*ends_of_steps(args, strategy, replicas=args.replicas, kills=True)))
    return {"pause_s": pauses_s, "rate_share": shares, "step_s": 1 / steps_per_s(plain)}


def tell_costs(args: argparse.Namespace) -> None:
    variants = {
        "neither": {"replicas": 0, "elastic": False},
        "replicas": {"replicas": args.replicas, "elastic": False},
        "elastic": {"replicas": 0, "elastic": True},
        "both": {"replicas": args.replicas, "elastic": True},
    }
    title = f"Nobody dies; {args.workers} workers, {args.servers} servers, replicas={args.replicas}, {args.model}"
    table = Table("strategy", "with", "a step ms", "rate beside neither", "from", "to", "kB a step", title=title)
    found: dict[str, Any] = {}
    for strategy in args.strategies:
        rates: dict[str, list[float]] = {name: [] for name in variants}
        sent: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(args.rounds):
            for name, chosen in variants.items():
                rates[name].append(steps_per_s(ends_of_steps(args, strategy, **chosen, sent=sent[name])[0]))
                print(strategy, name, rates[name][-1], sent[name][-1], load_average(), file=sys.stderr, flush=True)
        for name in variants:
            shares = [mine / plain for mine, plain in zip(rates[name], rates["neither"], strict=True)]
            row = (statistics.median(shares), min(shares), max(shares))
            step_ms, kilobytes = 1e3 / statistics.median(rates[name]), statistics.median(sent[name]) / 1e3
            table.add_row(strategy, name, f"{step_ms:.1f}", *(f"{each:.2f}" for each in row), f"{kilobytes:.0f}")
        found[strategy] = {"steps_per_s": rates, "bytes_a_step": sent}
    tell([table], {"workload": vars(args), "found": found, "load": load_average()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["ps-bsp", "ps-asp"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200, help="of each worker")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--costs", action="store_true", help="what replicas and --elastic cost while nobody dies")
    args = parser.parse_args()
    if args.costs:
        tell_costs(args)
        return
    title = f"A server is killed; {args.workers} workers, {args.servers} servers, replicas={args.replicas}"
    table = Table(
        "strategy", "a step s", "pause s", "least", "most", "rate beside replicas=0", "from", "to", title=title
    )
    found = {}
    for strategy in args.strategies:
        found[strategy] = measured = measure(args, strategy)
        pauses, shares = measured["pause_s"], measured["rate_share"]
        row = (measured["step_s"], statistics.median(pauses), min(pauses), max(pauses))
        rates = (statistics.median(shares), min(shares), max(shares))
        table.add_row(strategy, *(f"{each:.3f}" for each in row), *(f"{each:.2f}" for each in rates))
    tell([table], {"workload": vars(args), "found": found, "load": load_average()})


if __name__ == "__main__":
    main()
