"""How long training stands still when a server is killed that has a replica, and what replicas cost until then.

For each strategy and round, one run without replicas, one with them, and one with them in which a server is killed: the
time from SIGKILL to the end of the step that took longest around it, of the first worker's.

    python benchmarks/server_recovery.py --workers 2 --servers 2 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

from peers.deaths import committed
from recovery import train
from report import tell
from rich.table import Table

import paceline
from paceline.running.launch import Quiet

NEAR_S = 2.0
WARM_STEPS = 20


def ends_of_steps(args: argparse.Namespace, strategy: str, *, replicas: int, kills: bool) -> tuple[list[float], float]:
    """Of the first worker, in seconds since the epoch, and when a server was killed."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "out")
        struck_s: list[float] = []
        striking = Thread(target=_strike, args=(out, Path(directory, "steps-0"), args.steps // 2, struck_s))
        if kills:
            striking.start()
        paceline.run(
            partial(train, args.batch_size, directory, args.model, dies=False),
            workers=args.workers,
            strategy=strategy,
            options={"servers": args.servers, "replicas": replicas},
            max_steps=args.steps * (1 if strategy == "ps-bsp" else args.workers),
            out=out,
            watcher=Quiet(),
        )
        if kills:
            striking.join()
            names = [json.loads(line)["name"] for line in (out / "events.jsonl").read_text().splitlines()]
            assert names.count("taken_over") == 1
        ends_s = [each.when_s for each in committed(Path(directory))]
    return ends_s, struck_s[0] if struck_s else 0.0


def _strike(out: Path, steps: Path, when: int, struck_s: list[float]) -> None:
    """Kill the last server once the first worker has taken so many steps."""
    while not steps.exists() or len(steps.read_text().splitlines()) < when:
        time.sleep(0.01)
    first = json.loads((out / "events.jsonl").read_text().splitlines()[0])
    pids = {name: pid for name, pid in first["details"]["pids"].items() if name.startswith("server")}
    struck_s.append(time.time())
    os.kill(pids[max(pids)], signal.SIGKILL)


def pause_s(ends_s: list[float], struck_s: float) -> float:
    gaps = [pair for pair in pairwise(ends_s) if pair[1] > struck_s and pair[0] < struck_s + NEAR_S]
    return max(gaps, key=lambda gap: gap[1] - gap[0])[1] - struck_s


def steps_per_s(ends_s: list[float]) -> float:
    return (len(ends_s) - 1 - WARM_STEPS) / (ends_s[-1] - ends_s[WARM_STEPS])


def measure(args: argparse.Namespace, strategy: str) -> dict[str, Any]:
    pauses_s, shares = [], []
    for _ in range(args.rounds):
        plain, _ = ends_of_steps(args, strategy, replicas=0, kills=False)
        copied, _ = ends_of_steps(args, strategy, replicas=args.replicas, kills=False)
        shares.append(steps_per_s(copied) / steps_per_s(plain))
        pauses_s.append(pause_s(*ends_of_steps(args, strategy, replicas=args.replicas, kills=True)))
    return {"pause_s": pauses_s, "rate_share": shares, "step_s": 1 / steps_per_s(plain)}


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
    args = parser.parse_args()
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
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    tell([table], {"workload": vars(args), "found": found, "load": load})
    print(f"load average {load}")


if __name__ == "__main__":
    main()
