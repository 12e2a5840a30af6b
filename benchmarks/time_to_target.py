"""How well the virtual engine predicts when a run reaches its target, from one probe of two hosts.

Hosts are network namespaces of this machine, with a core each and links of limited rate (Linux and root needed; see
prediction.py). Each case trains a conv net on MNIST to an accuracy for real, once for each seed, and on the virtual
engine with the same seed. A case's error is that of its median over seeds; beside it stands the median of each run's.

    sudo python benchmarks/time_to_target.py --json time_to_target.json

Fails if a case's error is above 15 %, or it has no number, as where a run of any seed misses the target. What the JSON
file holds is not measured again, so that a measurement can be made in parts: each begins with a probe, since a
machine's speed changes, and is predicted from that.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from namespaces import Network, network
from prediction import PACELINE, enlarged, say
from report import tell
from rich.table import Table

import paceline
from paceline.errors import PacelineError
from paceline.running.launch import Quiet
from paceline.running.manifest import describe_machine
from paceline.running.result import Result

SCRIPT = Path(__file__).parents[1] / "recipes" / "low_bandwidth" / "train.py"
ARGUMENTS = ["--schedule", "constant", "--steps", "5000", "--batch-size", "100", "--lr", "0.05", "--momentum", "0.5"]
ARGUMENTS += ["--eval-samples", "1000"]
TARGET, EVAL_EVERY = "accuracy=0.93", "2000samples"
RATE_MBIT = 1000.0
NUM_HOSTS = 2
NUM_PROBED_STEPS = 500
BOUND = 0.15
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Case:
    """A strategy, as the command line has it, on so many hosts with a worker each."""

    strategy: str
    workers: int

    @property
    def label(self) -> str:
        return f"{self.strategy} on {self.workers}"


CASES = [
    Case("single", 1),
    Case("all-reduce", 2),
    Case("ps-bsp", 2),
    Case("ps-asp", 2),
    Case("local-sgd:every=8", 2),
]


@dataclass(frozen=True)
class Row:
    """Seconds to the target with a seed; infinite where a run never came there."""

    case: Case
    seed: int
    measured_s: float
    measured_steps: int
    """Of all workers, up to the target."""
    probe: int
    """Which of the report's it was measured after."""
    predicted_s: float = math.nan
    predicted_steps: int = 0

    @property
    def error(self) -> float:
        """Not a number where either never came to the target."""
        came_there = math.isfinite(self.predicted_s) and math.isfinite(self.measured_s)
        return self.predicted_s / self.measured_s - 1 if came_there else math.nan


class Report:
    """What has been found so far, which a file may keep."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.clusters: list[str] = []
        """The probes' files."""
        self.rows: dict[tuple[Case, int], Row] = {}
        if path is not None and path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))
            self.clusters = held["clusters"]
            rows = [Row(**{**row, "case": Case(**row["case"])}) for row in held["rows"]]
            self.rows = {(row.case, row.seed): row for row in rows}

    def keep(self) -> None:
        if self._path is not None:
            held = {"clusters": self.clusters, "rows": [asdict(row) for row in self.rows.values()]}
            self._path.write_text(json.dumps({**held, "machine": describe_machine()}, indent=1), encoding="utf-8")

    def of(self, case: Case) -> list[Row]:
        return [row for (other, _), row in self.rows.items() if other == case]

    def error(self, case: Case, *, num_seeds: int) -> float:
        """Of the medians; not a number where a seed is missing, or never came to the target."""
        rows = self.of(case)
        if len(rows) < num_seeds or not all(math.isfinite(row.error) for row in rows):
            return math.nan
        return statistics.median(r.predicted_s for r in rows) / statistics.median(r.measured_s for r in rows) - 1


def probed(net: Network, ray: str) -> str:
    """The file that a probe of both hosts writes."""
    out = net.directory / "cluster.toml"
    command = [PACELINE, "probe", str(SCRIPT), "--address", ray, "--out", str(out), "--force"]
    net.run(net.hosts[0], [*command, "--steps", str(NUM_PROBED_STEPS), "--", *ARGUMENTS], timeout_s=TIMEOUT_S)
    return out.read_text(encoding="utf-8")


def reached(result: Result) -> tuple[float, int]:
    """Seconds, and steps of all workers, to the target; infinite, and all steps, if the run never came there."""
    time_s = math.inf if result.time_to_target_s is None else result.time_to_target_s
    return time_s, sum(step.time_s <= time_s for step in result.steps)


def measured(net: Network, ray: str, case: Case, seed: int) -> tuple[float, int]:
    """As `reached`."""
    with tempfile.TemporaryDirectory(dir=net.directory) as directory:
        out = Path(directory) / "run"
        command = [PACELINE, "run", str(SCRIPT), "--strategy", case.strategy, "--workers", str(case.workers)]
        command += ["--address", ray, "--device", "cpu", "--seed", str(seed), "--out", str(out)]
        command += ["--target", TARGET, "--eval-every", EVAL_EVERY, "--", *ARGUMENTS]
        net.run(net.hosts[0], command, timeout_s=TIMEOUT_S)
        return reached(Result.open(out))


def predicted(row: Row, cluster_text: str) -> Row:
    with tempfile.TemporaryDirectory() as directory:
        result = paceline.run(
            SCRIPT,
            strategy=row.case.strategy,
            workers=row.case.workers,
            arguments=ARGUMENTS,
            engine="virtual",
            cluster=enlarged(cluster_text, num_hosts=NUM_HOSTS),
            device="cpu",
            seed=row.seed,
            target=TARGET,
            eval_every=EVAL_EVERY,
            watcher=Quiet(),
            out=Path(directory) / "run",
        )
        predicted_s, predicted_steps = reached(result)
        return replace(row, predicted_s=predicted_s, predicted_steps=predicted_steps)


def measure_all(report: Report, *, seeds: Sequence[int], until_s: float) -> Iterator[None]:
    """Probe and run what the report has not yet; it has more after each."""
    missing = [(case, seed) for seed in seeds for case in CASES if (case, seed) not in report.rows]
    if not missing:
        return
    with network(NUM_HOSTS) as net:
        ray = net.start_ray()
        net.limit(RATE_MBIT)
        report.clusters.append(probed(net, ray))
        for case, seed in missing:
            began_s = time.monotonic()
            if began_s > until_s:
                say(f"no time left for {case.label}, seed {seed}")
                continue
            try:
                row = Row(case, seed, *measured(net, ray, case, seed), probe=len(report.clusters) - 1)
            except RuntimeError as error:
                say(f"{case.label}, seed {seed}: {error}")  # the others are worth having
                continue
            report.rows[case, seed] = row
            say(f"{case.label}, seed {seed}: {row.measured_s:.2f} s; took {time.monotonic() - began_s:.0f} s")
            yield


def table_of(report: Report, *, num_seeds: int) -> Table:
    table = Table(title=f"Seconds to {TARGET.replace('=', ' ')}, medians and runs", title_justify="left")
    table.add_column("strategy")
    for heading in (
        "workers",
        "predicted",
        "measured",
        "runs",
        "steps, predicted",
        "steps, measured",
        "error",
        "of a run",
    ):
        table.add_column(heading, justify="right")
    for case in CASES:
        rows = report.of(case)
        if not rows:
            continue
        predicted_s, times_s = [row.predicted_s for row in rows], [row.measured_s for row in rows]
        table.add_row(
            case.strategy,
            str(case.workers),
            f"{statistics.median(predicted_s):.2f} ({min(predicted_s):.2f} to {max(predicted_s):.2f})",
            f"{statistics.median(times_s):.2f} ({min(times_s):.2f} to {max(times_s):.2f})",
            str(len(rows)),
            f"{statistics.median(row.predicted_steps for row in rows):.0f}",
            f"{statistics.median(row.measured_steps for row in rows):.0f}",
            f"{report.error(case, num_seeds=num_seeds):+.1%}",
            f"{statistics.median(row.error for row in rows):+.1%}",
        )
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each case")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no further measurement after so long")
    parser.add_argument("--json", type=Path, help="keep the numbers, and the probe's file, here")
    parser.add_argument("--no-measurement", action="store_true", help="only predict what the JSON file holds")
    parser.add_argument("--no-prediction", action="store_true", help="only measure")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # as many as a host has cores
    report = Report(args.json)
    if not args.no_measurement:
        until_s = time.monotonic() + 60 * args.minutes
        for _ in measure_all(report, seeds=range(args.seeds), until_s=until_s):
            report.keep()
    if args.no_prediction:
        return
    for name, row in report.rows.items():
        try:
            report.rows[name] = predicted(row, report.clusters[row.probe])
        except PacelineError as error:
            say(f"{row.case.label}, seed {row.seed}: {error}")
            report.rows[name] = replace(row, predicted_s=math.nan, predicted_steps=0)  # the others are worth having
        report.keep()
    errors = {case.label: report.error(case, num_seeds=args.seeds) for case in CASES}
    tell([table_of(report, num_seeds=args.seeds)], {"errors": errors})
    missed = [f"{label}: {error:+.1%}" for label, error in errors.items() if not abs(error) <= BOUND]
    sys.exit("; ".join(missed) or None)


if __name__ == "__main__":
    main()
