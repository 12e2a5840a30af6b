"""Steps of rare, small and few exchanges on 8 real hosts with slow links, beside the virtual engine's and a plan's.

    sudo python benchmarks/slow_links.py
    sudo python benchmarks/slow_links.py --json slow_links.json --no-prediction --minutes 4
    python benchmarks/slow_links.py --json slow_links.json --no-measurement

Hosts are network namespaces of this machine with links of 100 Mbit/s (Linux and root needed). Workers exchange what
ResNet-18 of width 8 has, 0.7 MB, under the methods of time_to_accuracy.py, and sleep instead of computing, so that they
do not fight for the cores that they share. A probe of two of the hosts describes the cluster, as in prediction.py. Both
predictions are made from its file alone: scripts sleep in simulated time, too, and to a plan the sleep is what a step
takes besides computing. A step is what a worker took for one on the average while all were at it, over whole rounds.
The table has the median of the workers, and of several runs again the median.

Runs that the JSON file holds stay, and are not made again: so parts can be run at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from namespaces import Network, network
from prediction import PACELINE, enlarged, say
from report import load_average, tell
from rich.table import Table
from time_to_accuracy import DDP, PARTS

import paceline
from paceline.cluster.description import Cluster
from paceline.engines.scripting import read_script
from paceline.lab.variant import Variant
from paceline.planner import predict
from paceline.planner.observing import observe
from paceline.running.launch import Quiet
from paceline.running.result import Result

SCRIPT = Path(__file__).with_name("exchange_script.py")
HOSTS, RATE_MBIT, SLEEP_S = 8, 100.0, 0.02
WARM_UP, NUM_TIMED = 50, 100
"""Steps before those that are timed, which are as many as the longest round has, and those that are timed, where a step
may be as short as computing."""
FEW_WARM_UP, FEW_TIMED = 20, 40
"""Where every step exchanges."""
PROBED_STEPS = 100
"""Enough that those with which a run begins and ends, of some 20 ms, are few."""
NICENESS = -5
TIMEOUT_S = 300.0


class Kept(TypedDict):
    """What was measured."""

    cluster: str | None
    """The probe's file."""
    runs: dict[str, list[float]]
    """Seconds of a step in each run, by strategy."""


def steps_of(strategy: str) -> tuple[int, int]:
    """How many warm up, and how many are timed after these."""
    return (WARM_UP, NUM_TIMED) if Variant.parse(strategy).strategy.traits.unit == "round" else (FEW_WARM_UP, FEW_TIMED)


def arguments(steps: int) -> list[str]:
    return ["--model", "resnet18", "--width", "8", "--steps", str(steps), "--sleep-s", str(SLEEP_S)]


def step_s(result: Result, strategy: str) -> float:
    """Median over workers; a worker's is from its last step of warming up to its last one."""
    warm_up, timed = steps_of(strategy)
    ends_s: dict[int, list[float]] = {}
    for step in result.steps:
        ends_s.setdefault(step.worker, []).append(step.time_s)
    return statistics.median((own_s[warm_up + timed - 1] - own_s[warm_up - 1]) / timed for own_s in ends_s.values())


# --- prediction ------------------------------------------------------------------------------------------------------


def simulated_s(cluster: Cluster, strategy: str) -> float:
    with tempfile.TemporaryDirectory() as directory:
        result = paceline.run(
            SCRIPT,
            strategy=strategy,
            workers=HOSTS,
            arguments=arguments(sum(steps_of(strategy))),
            engine="virtual",
            cluster=cluster,
            device="cpu",
            watcher=Quiet(),
            out=Path(directory) / "run",
        )
        return step_s(result, strategy)


def planned_s(cluster: Cluster, strategies: Sequence[str]) -> dict[str, float]:
    work = replace(observe(read_script(SCRIPT, arguments(PROBED_STEPS))).work, overhead_s=SLEEP_S)
    return {
        each: predict(cluster, strategy=Variant.parse(each).strategy, workers=HOSTS, work=work).step_s
        for each in strategies
    }


# --- measurement -----------------------------------------------------------------------------------------------------


def probed() -> str:
    """The file of a probe of two hosts."""
    with network(2) as net:
        net.limit(RATE_MBIT)
        ray = net.start_ray()
        out = net.directory / "cluster.toml"
        command = [PACELINE, "probe", str(SCRIPT), "--address", ray, "--out", str(out), "--steps", str(PROBED_STEPS)]
        command += ["--max-time", "6", "--", *arguments(2 * PROBED_STEPS)]
        net.run(net.hosts[0], command, timeout_s=TIMEOUT_S)
        return out.read_text(encoding="utf-8")


def measured_s(net: Network, ray: str, strategy: str) -> float:
    with tempfile.TemporaryDirectory(dir=net.directory) as directory:
        out = Path(directory) / "run"
        command = [PACELINE, "run", str(SCRIPT), "--strategy", strategy, "--workers", str(HOSTS), "--address", ray]
        command += ["--device", "cpu", "--out", str(out), "--", *arguments(sum(steps_of(strategy)))]
        net.run(net.hosts[0], command, timeout_s=TIMEOUT_S)
        return step_s(Result.open(out), strategy)


def measure(strategies: Sequence[str], kept: Kept, keep: Callable[[], None], *, num_runs: int, until_s: float) -> None:
    """Probe the cluster, then run each strategy until there are so many runs of it, or time is over."""
    if kept["cluster"] is None:
        kept["cluster"] = probed()
        keep()
    runs = {each: kept["runs"].setdefault(each, []) for each in strategies}
    missing = [each for number in range(num_runs) for each in strategies if len(runs[each]) <= number]
    if not missing:
        return
    with network(HOSTS) as net:
        net.limit(RATE_MBIT)
        ray = net.start_ray()
        for strategy in missing:
            if time.monotonic() > until_s:
                say(f"no time left for {strategy}")
                continue
            try:
                runs[strategy].append(measured_s(net, ray, strategy))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                say(f"{strategy}: {error}")  # the others are worth having
                continue
            say(f"{strategy}: {runs[strategy][-1] * 1e3:.1f} ms, load {load_average()}")
            keep()


# --- the whole -------------------------------------------------------------------------------------------------------


def table_of(runs: dict[str, list[float]], simulated: dict[str, float], planned: dict[str, float]) -> Table:
    table = Table(title="A step, ms", title_justify="left")
    table.add_column("method")
    for title in ("simulated", "planned", "measured", "runs", "simulated beside it", "planned beside it"):
        table.add_column(title, justify="right")
    for strategy, own_s in runs.items():
        middle_s, predicted_s = statistics.median(own_s), (simulated[strategy], planned[strategy])
        table.add_row(
            f"`{strategy}`",
            *(f"{each_s * 1e3:.1f}" for each_s in (*predicted_s, middle_s)),
            f"{min(own_s) * 1e3:.1f} to {max(own_s) * 1e3:.1f}" if len(own_s) > 1 else "1",
            *(f"{each_s / middle_s - 1:+.0%}" for each_s in predicted_s),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="STRATEGY", help="of those of time_to_accuracy.py")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further run after so long")
    parser.add_argument("--json", type=Path, help="keep the probe's file and the runs here")
    parser.add_argument("--no-measurement", action="store_true", help="only predict what the JSON file holds")
    parser.add_argument("--no-prediction", action="store_true", help="only measure")
    args = parser.parse_args()
    until_s = time.monotonic() + 60 * args.minutes
    strategies = args.only or (DDP, *PARTS["resnet18"].strategies)
    kept: Kept = {"cluster": None, "runs": {}}
    if args.json and args.json.exists():
        kept = json.loads(args.json.read_text(encoding="utf-8"))

    def keep() -> None:
        if args.json:
            args.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")

    if not args.no_measurement:
        os.nice(NICENESS)
        measure(strategies, kept, keep, num_runs=args.runs, until_s=until_s)
    if args.no_prediction:
        return
    runs = {each: kept["runs"][each] for each in strategies if kept["runs"].get(each)}
    if not runs or kept["cluster"] is None:
        raise SystemExit("nothing has been measured")
    cluster = enlarged(kept["cluster"], num_hosts=HOSTS)
    simulated = {each: simulated_s(cluster, each) for each in runs}
    tell(
        [table_of(runs, simulated, planned_s(cluster, list(runs)))],
        {"hosts": HOSTS, "mbit_per_s": RATE_MBIT, "sleep_s": SLEEP_S},
    )


if __name__ == "__main__":
    main()
