"""Steps of rare, small and few exchanges on 8 real hosts with slow links, beside the virtual engine's.

    sudo python benchmarks/slow_links.py

Hosts are network namespaces of this machine with links of 100 Mbit/s (Linux and root needed). Workers exchange what
ResNet-18 of width 8 has, 0.7 MB, under the methods of time_to_accuracy.py, and sleep instead of computing, so that they
do not fight for the cores that they share. A probe of two of the hosts describes the cluster that is simulated. A step
is what each worker took for one on the average while all were at it, over whole rounds; of these the median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from namespaces import Network, network
from prediction import PACELINE, enlarged, say
from report import tell
from rich.table import Table
from time_to_accuracy import DDP, PARTS

import paceline
from paceline.cluster.description import Cluster
from paceline.lab.variant import Variant
from paceline.running.launch import Quiet
from paceline.running.result import Result

SCRIPT = Path(__file__).with_name("exchange_script.py")
HOSTS, RATE_MBIT, SLEEP_S = 8, 100.0, 0.02
WARM_UP, NUM_TIMED = 50, 100
"""Steps before those that are timed, which are as many as the longest round has, and those that are timed, where a step
may be as short as computing."""
FEW_WARM_UP, FEW_TIMED = 20, 40
"""Where every step exchanges."""
PROBED_STEPS = 20
NICENESS = -5
TIMEOUT_S = 300.0


def steps_of(strategy: str) -> tuple[int, int]:
    """How many warm up, and how many are timed after these."""
    return (WARM_UP, NUM_TIMED) if Variant.parse(strategy).strategy.traits.unit == "round" else (FEW_WARM_UP, FEW_TIMED)


def arguments(steps: int, *, sleep_s: float) -> list[str]:
    return ["--model", "resnet18", "--width", "8", "--steps", str(steps), "--sleep-s", str(sleep_s)]


def step_s(result: Result, strategy: str) -> float:
    """Median over workers; a worker's is from its last step of warming up to its last one."""
    warm_up, timed = steps_of(strategy)
    ends_s: dict[int, list[float]] = {}
    for step in result.steps:
        ends_s.setdefault(step.worker, []).append(step.time_s)
    return statistics.median((own_s[warm_up + timed - 1] - own_s[warm_up - 1]) / timed for own_s in ends_s.values())


def probed(net: Network) -> Cluster:
    """What a probe of the first two hosts says, for all of them."""
    ray = net.start_ray(2)
    out = net.directory / "cluster.toml"
    command = [PACELINE, "probe", str(SCRIPT), "--address", ray, "--out", str(out), "--steps", str(PROBED_STEPS)]
    command += ["--max-time", "6", "--", *arguments(10 * PROBED_STEPS, sleep_s=SLEEP_S)]
    net.run(net.hosts[0], command, timeout_s=TIMEOUT_S)
    return enlarged(out.read_text(encoding="utf-8"), num_hosts=HOSTS)


def measured_s(net: Network, ray: str, strategy: str) -> float:
    with tempfile.TemporaryDirectory(dir=net.directory) as directory:
        out = Path(directory) / "run"
        command = [PACELINE, "run", str(SCRIPT), "--strategy", strategy, "--workers", str(HOSTS), "--address", ray]
        command += ["--device", "cpu", "--out", str(out), "--", *arguments(sum(steps_of(strategy)), sleep_s=SLEEP_S)]
        net.run(net.hosts[0], command, timeout_s=TIMEOUT_S)
        return step_s(Result.open(out), strategy)


def simulated_s(cluster: Cluster, strategy: str) -> float:
    with tempfile.TemporaryDirectory() as directory:
        result = paceline.run(
            SCRIPT,
            strategy=strategy,
            workers=HOSTS,
            arguments=arguments(sum(steps_of(strategy)), sleep_s=0.0),
            engine="virtual",
            cluster=cluster,
            device="cpu",
            watcher=Quiet(),
            out=Path(directory) / "run",
        )
        return step_s(result, strategy)


def show(strategies: Sequence[str], simulated: dict[str, float], measured: dict[str, list[float]]) -> None:
    table = Table()
    table.add_column("method")
    for title in ("simulated, ms a step", "measured", "runs", "simulated beside measured"):
        table.add_column(title, justify="right")
    for strategy in strategies:
        runs_s, expected_s = measured[strategy], simulated[strategy]
        middle_s = statistics.median(runs_s)
        table.add_row(
            f"`{strategy}`",
            f"{expected_s * 1e3:.1f}",
            f"{middle_s * 1e3:.1f}",
            f"{min(runs_s) * 1e3:.1f} to {max(runs_s) * 1e3:.1f}" if len(runs_s) > 1 else "1",
            f"{expected_s / middle_s - 1:+.0%}",
        )
    tell([table], {"hosts": HOSTS, "mbit_per_s": RATE_MBIT, "sleep_s": SLEEP_S})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="STRATEGY", help="of those of time_to_accuracy.py")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    strategies = args.only or (DDP, *PARTS["resnet18"].strategies)
    os.nice(NICENESS)
    with network(HOSTS) as net:
        net.limit(RATE_MBIT)
        cluster = probed(net)
    say(str(cluster))
    measured: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    with network(HOSTS) as net:
        net.limit(RATE_MBIT)
        ray = net.start_ray()
        for _ in range(args.runs):
            for strategy in strategies:
                try:
                    measured[strategy].append(measured_s(net, ray, strategy))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    say(f"{strategy}: {error}")  # the others are worth having
                else:
                    say(f"{strategy}: {measured[strategy][-1] * 1e3:.1f} ms")
    known = [strategy for strategy in strategies if measured[strategy]]
    show(known, {strategy: simulated_s(cluster, strategy) for strategy in known}, measured)


if __name__ == "__main__":
    main()
