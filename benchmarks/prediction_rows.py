"""Steps of scripts with a table of rows on servers, beside what the virtual engine and a plan predict.

    sudo python benchmarks/prediction_rows.py

Hosts are network namespaces of this machine (Linux and root needed). Two workers look up some thousand keys a step,
which come alike or by Zipf's law, and sleep instead of computing. Two servers are on the workers' hosts, or on two
others. For each rate and kind of keys a probe of two hosts describes the cluster, as in prediction.py, from whose file
alone both predictions are made. A step is what a worker took for one on the average while both were at it, as there; of
several runs the median counts. Bytes are what a worker's step has moved.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from namespaces import Network, network
from prediction import PACELINE, enlarged, say
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from report import tell
from rich.table import Table

import paceline
from paceline.cluster.description import Cluster
from paceline.engines.scripting import read_script
from paceline.lab.variant import Variant
from paceline.planner import StepWork, predict
from paceline.planner.observing import observe
from paceline.running.launch import Quiet
from paceline.running.result import Result

SCRIPT = Path(__file__).with_name("row_script.py")
NICENESS = -10
"""Of what is measured, beside light other work."""
WORKERS, SERVERS, SLEEP_S, WARM_UP, PROBED_STEPS, TIMEOUT_S = 2, 2, 0.02, 12, 30, 300.0
"""Steps of warming up make nine of ten rows."""
NUM_TIMED = {100.0: 20, 1000.0: 60}
"""Steps, by Mbit/s."""
STRATEGIES = (
    "ps-bsp:servers=2",
    "ps-asp:servers=2",
    "ps-asp:servers=2:row_staleness=3",
    "ps-ssp:servers=2:row_staleness=3",
)
LAWS = {"alike": 0.0, "zipf": 1.1}
"""Exponents, of keys that come alike and of those that come by Zipf's law."""


@dataclass(frozen=True)
class Cell:
    """One run to predict."""

    rate_mbit: float
    keys: str
    is_apart: bool
    """Servers have hosts of their own."""
    strategy: str

    @property
    def num_steps(self) -> int:
        return WARM_UP + NUM_TIMED[self.rate_mbit]

    @property
    def num_hosts(self) -> int:
        return WORKERS + SERVERS * self.is_apart

    @property
    def probe(self) -> str:
        """What its cluster is probed with."""
        return f"{self.rate_mbit:g} {self.keys}"

    @property
    def label(self) -> str:
        return f"{self.rate_mbit:g} {self.keys}, {'apart' if self.is_apart else 'beside'}, {self.strategy}"

    def arguments(self, num_steps: int, *, sleep_s: float = SLEEP_S) -> list[str]:
        return ["--steps", str(num_steps), "--sleep-s", str(sleep_s), "--zipf", str(LAWS[self.keys])]


@dataclass(frozen=True)
class Step:
    seconds: float
    moved_bytes: float
    """By a worker."""


def step_of(result: Result) -> Step:
    """While all workers were at it, the median over workers."""
    ends_s: dict[int, list[float]] = {}
    for step in result.steps:
        ends_s.setdefault(step.worker, []).append(step.time_s)
    began_s, ended_s = max(own[WARM_UP - 1] for own in ends_s.values()), min(own[-1] for own in ends_s.values())
    counts = [np.ptp(np.interp([began_s, ended_s], own, range(len(own)))) for own in ends_s.values()]
    moved = statistics.mean(step.moved_bytes for step in result.steps if step.step > WARM_UP)
    return Step(statistics.median((ended_s - began_s) / count for count in counts), moved)


# --- prediction ------------------------------------------------------------------------------------------------------


def probed(net: Network, cell: Cell) -> str:
    """The file of a probe of the two hosts."""
    net.limit(cell.rate_mbit)
    out = net.directory / "cluster.toml"
    command = [PACELINE, "probe", str(SCRIPT), "--address", net_address(net), "--out", str(out), "--force"]
    command += ["--steps", str(PROBED_STEPS), "--max-time", "6", "--", *cell.arguments(10 * PROBED_STEPS)]
    net.run(net.hosts[0], command, timeout_s=TIMEOUT_S)
    return out.read_text(encoding="utf-8")


def net_address(net: Network) -> str:
    return f"{net.hosts[0].address}:6379"


def cluster_of(cell: Cell, text: str) -> Cluster:
    cluster = enlarged(text, num_hosts=cell.num_hosts)
    return replace(cluster, servers=replace(cluster.servers, placement="separate" if cell.is_apart else "with workers"))


def simulated(cell: Cell, text: str) -> Step:
    with tempfile.TemporaryDirectory() as directory:
        result = paceline.run(
            SCRIPT,
            **strategy_of(cell),
            arguments=cell.arguments(cell.num_steps),
            engine="virtual",
            cluster=cluster_of(cell, text),
            device="cpu",
            watcher=Quiet(),
            out=Path(directory) / "run",
        )
        return step_of(result)


def strategy_of(cell: Cell) -> dict[str, Any]:
    return {"strategy": Variant.parse(cell.strategy).strategy, "workers": WORKERS}


def planned_s(cell: Cell, text: str, work: StepWork) -> float:
    """A plan knows of no sleep, which adds to what a step computes."""
    return predict(cluster_of(cell, text), **strategy_of(cell), work=work).step_s + SLEEP_S


# --- measurement -----------------------------------------------------------------------------------------------------


def measured(net: Network, cell: Cell) -> Step:
    net.limit(cell.rate_mbit)
    with tempfile.TemporaryDirectory(dir=net.directory) as directory:
        out = Path(directory) / "run"
        command = [PACELINE, "run", str(SCRIPT), "--strategy", cell.strategy, "--workers", str(WORKERS)]
        command += ["--address", net_address(net), "--device", "cpu", "--out", str(out)]
        if cell.is_apart:
            cores = json.dumps({host.address: host.core for host in net.hosts})
            command = [sys.executable, __file__, "--launch", net_address(net), cores, cell.strategy, str(out)]
        net.run(net.hosts[0], [*command, "--", *cell.arguments(cell.num_steps)], timeout_s=TIMEOUT_S)
        return step_of(Result.open(out))


def launch(address: str, cores: dict[str, int], strategy: str, out: str, arguments: Sequence[str]) -> None:
    """Run the script with servers on hosts of their own: from a task in a placement group of a bundle on each host, of
    which the task's own host and the first of the others, by Ray's name for it, get a worker. These have different
    cores."""
    ray.init(address=address, log_to_driver=False)
    nodes = sorted((node["NodeID"], node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])
    _, second = nodes[0]
    first = next(host for _, host in nodes if cores[host] != cores[second])
    hosts = [first, *(host for _, host in nodes if host != first)]
    group = placement_group([{"CPU": 1, f"node:{host}": 0.01} for host in hosts], strategy="STRICT_SPREAD")
    ray.get(group.ready())
    here = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )

    @ray.remote(num_cpus=0, scheduling_strategy=here)
    def train() -> None:
        paceline.run(
            SCRIPT,
            strategy=Variant.parse(strategy).strategy,
            workers=WORKERS,
            arguments=arguments,
            device="cpu",
            watcher=Quiet(),
            out=out,
        )

    ray.get(train.remote())


# --- the whole -------------------------------------------------------------------------------------------------------


def table_of(cells: Sequence[Cell], runs: dict[str, list[Step]], found: dict[str, tuple[Step, float]]) -> Table:
    table = Table(title="A step, ms, and MB that a worker moves in one", title_justify="left")
    for title in ("Mbit/s", "keys", "servers", "strategy"):
        table.add_column(title, justify="right" if title == "Mbit/s" else "left")
    for title in ("simulated", "planned", "measured", "runs", "simulated", "planned", "MB simulated", "measured"):
        table.add_column(title, justify="right")
    for cell in cells:
        steps, (simulation, plan_s) = runs[cell.label], found[cell.label]
        seconds = [step.seconds for step in steps]
        middle_s = statistics.median(seconds)
        table.add_row(
            f"{cell.rate_mbit:g}",
            cell.keys,
            "apart" if cell.is_apart else "beside",
            f"`{cell.strategy.replace(':servers=2', '')}`",
            *(f"{1e3 * each:.1f}" for each in (simulation.seconds, plan_s, middle_s)),
            f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}",
            *(f"{each / middle_s - 1:+.0%}" for each in (simulation.seconds, plan_s)),
            f"{simulation.moved_bytes / 1e6:.3f}",
            f"{statistics.median(step.moved_bytes for step in steps) / 1e6:.3f}",
        )
    return table


def measure(cells: Sequence[Cell], kept: dict[str, Any], keep: Callable[[], None]) -> None:
    """Probe each cluster, then run each cell once more."""
    with network(2) as net:
        net.start_ray()
        for name, cell in {cell.probe: cell for cell in cells}.items():
            if name not in kept["clusters"]:
                kept["clusters"][name] = probed(net, cell)
                say(f"probed {name}")
                keep()
    for is_apart in (False, True):
        asked = [cell for cell in cells if cell.is_apart is is_apart]
        if not asked:
            continue
        with network(asked[0].num_hosts) as net:
            net.start_ray()
            for cell in asked * kept["num_runs"]:
                try:
                    step = measured(net, cell)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    say(f"{cell.label}: {error}")  # the others are worth having
                    continue
                kept["runs"].setdefault(cell.label, []).append([step.seconds, step.moved_bytes])
                say(f"{cell.label}: {1e3 * step.seconds:.1f} ms")
                keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 1000.0], choices=NUM_TIMED, metavar="MBIT")
    parser.add_argument("--keys", nargs="+", default=list(LAWS), choices=LAWS)
    parser.add_argument("--servers", nargs="+", default=["beside", "apart"], choices=["beside", "apart"])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), metavar="STRATEGY")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="keep the numbers, and the probes' files, here")
    parser.add_argument("--no-measurement", action="store_true", help="only predict what the JSON file holds")
    args = parser.parse_args()
    asked = itertools.product(args.rates, args.keys, args.servers, args.strategies)
    cells = [Cell(rate, keys, servers == "apart", strategy) for rate, keys, servers, strategy in asked]
    kept: dict[str, Any] = {"clusters": {}, "runs": {}}
    if args.json and args.json.exists():
        kept = json.loads(args.json.read_text())
    kept["num_runs"] = args.runs

    def keep() -> None:
        if args.json:
            args.json.write_text(json.dumps(kept, indent=1))

    if not args.no_measurement:
        os.nice(NICENESS)
        measure(cells, kept, keep)
    cells = [cell for cell in cells if cell.label in kept["runs"]]
    works = {
        keys: observe(read_script(SCRIPT, next(c for c in cells if c.keys == keys).arguments(20, sleep_s=0.0))).work
        for keys in {cell.keys for cell in cells}
    }
    found = {}
    for cell in cells:
        text = kept["clusters"][cell.probe]
        found[cell.label] = simulated(cell, text), planned_s(cell, text, works[cell.keys])
    runs = {label: [Step(*step) for step in steps] for label, steps in kept["runs"].items()}
    tell([table_of(cells, runs, found)], {"sleep_s": SLEEP_S, "workers": WORKERS, "servers": SERVERS})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--launch"]:
        address, cores, strategy, out, _, *rest = sys.argv[2:]
        launch(address, json.loads(cores), strategy, out, rest)
    else:
        main()
