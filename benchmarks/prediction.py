"""How well the virtual engine predicts real runs of a cluster that was probed with two of its hosts.

Hosts are network namespaces on this machine with links of limited rate, as in network.py (Linux and root needed). For
each rate, model and workload, `paceline probe` measures two hosts once. From its file alone, with `count` raised and
`shared_cores` added, since all hosts are this one machine, the virtual engine runs the same script under each strategy
and number of hosts; then the real hosts do. A row compares the time of a step: what each worker took for one on the
average while all were at it, none of them warming up or through, and of these the median; of several runs (`--runs`)
the middle one's. Under ps-asp, workers end at the same time instead of after as many steps, and the only server's host
is left out, as its worker crosses no link.

Workloads: `sleep` exchanges gradients as large as the model's and sleeps instead of computing (the conv net 20 ms,
ResNet-18 100 ms), so that hosts do not fight for the cores that they share; `compute` trains.

    sudo python benchmarks/prediction.py --json prediction.json --no-prediction
    sudo python benchmarks/prediction.py --json prediction.json --no-prediction --workload compute --rates 1000
    python benchmarks/prediction.py --json prediction.json --no-measurement --figures docs/figures
    sudo python benchmarks/prediction.py --held-out --json held_out.json --minutes 240

The last one asks about cells that no constant of the models was chosen in sight of: other numbers of hosts and other
rates, both workloads. It says whether the errors are within the bounds that Paceline promises, and fails if they are
not. Only a machine with nothing else to do can answer.

Rows of an earlier run in the JSON file stay unless they are measured again, so that parts can be run at a time. What
does not fit into `--minutes` is left out and said; few hosts come first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from namespaces import Network, network
from peers.exchange import gradient_bytes
from plots import Series, scatter_chart
from report import tell
from rich.table import Table

import paceline
from paceline.cluster import reading as cluster_file
from paceline.cluster.description import Cluster
from paceline.running.launch import Quiet
from paceline.running.manifest import describe_machine
from paceline.running.result import Result

HERE = Path(__file__).parent
PACELINE = str(Path(sys.executable).parent / "paceline")
SLEEP_S = {"resnet18": 0.1, "convnet": 0.02}
BATCH_SIZE = {"convnet": 100, "resnet18": 4}
NUM_WARMUP = {"convnet": 10, "resnet18": 2}  # the first ones meet a link whose rate has just changed
MAX_STEPS = {"convnet": 40, "resnet18": 6}
NUM_PROBED_STEPS = 20
STEPS_BUDGET_S = 8.0
"""A run times fewer steps than MAX_STEPS where these would take longer, but one at least."""
ASYNCHRONOUS_TIMES = 4
"""As many steps, and as long, of workers that do not wait for each other: where they meet is chance."""
LEAST_ASYNCHRONOUS_STEPS = 6
"""Of a step of 13 s, a worker that was badly served took none within five of them."""
LEAST_STEP_S = 5e-3
"""No worker takes more steps than so long ones before its time is over."""
OPEN_MBIT = 20_000.0
TIMEOUT_S = 300.0
FITTED_HOSTS, FITTED_MBIT = (2, 4, 8), (100.0, 1000.0)
"""Of the documented grid, in sight of which constants were chosen."""
HELD_OUT_HOSTS, HELD_OUT_MBIT = (3, 6), (250.0, 600.0)
MEDIAN_BOUND, WORST_BOUND = 0.03, 0.10
"""Of the errors' absolute values, on cells that are held out."""


@dataclass(frozen=True)
class Cell:
    """One run to predict."""

    rate_mbit: float
    model: str
    workload: str
    num_hosts: int
    strategy: str
    num_servers: int

    @property
    def probe(self) -> str:
        """What its cluster is probed with."""
        return f"{self.rate_mbit:g} {self.model} {self.workload}"

    @property
    def label(self) -> str:
        servers = f", {self.num_servers} server(s)" if self.num_servers else ""
        return f"{self.probe}, {self.num_hosts} hosts, {self.strategy}{servers}"

    @property
    def is_held_out(self) -> bool:
        return self.num_hosts not in FITTED_HOSTS and self.rate_mbit not in FITTED_MBIT

    @property
    def link_s(self) -> float:
        """A step as the busiest link alone would have it, both ways at the same time."""
        n, k = self.num_hosts, self.num_servers
        passes = max(1, (n + k - 2) / k) if k else 2 * (n - 1) / n
        return SLEEP_S[self.model] + passes * gradient_bytes(self.model) / (self.rate_mbit * 1e6 / 8)

    @property
    def is_asynchronous(self) -> bool:
        return self.strategy == "ps-asp"

    @property
    def num_steps(self) -> int:
        """That are timed, about so many where workers do not wait for each other."""
        times, least = (ASYNCHRONOUS_TIMES, LEAST_ASYNCHRONOUS_STEPS) if self.is_asynchronous else (1, 1)
        return min(times * MAX_STEPS[self.model], max(least, round(times * STEPS_BUDGET_S / self.link_s)))

    @property
    def max_time_s(self) -> float | None:
        """What ends a run whose workers are not to be through one after the other."""
        return (NUM_WARMUP[self.model] + self.num_steps) * self.link_s if self.is_asynchronous else None

    @property
    def options(self) -> dict[str, str]:
        return {"servers": str(self.num_servers)} if self.num_servers else {"algorithm": "ring"}

    @property
    def max_steps(self) -> int:
        """After which a worker is through: more than there is time for, if time ends the run."""
        if self.max_time_s is not None:
            return math.ceil(self.max_time_s / LEAST_STEP_S)
        return NUM_WARMUP[self.model] + self.num_steps

    def script(self, max_steps: int) -> tuple[Path, list[str]]:
        """The script that every worker runs, and its arguments."""
        arguments = ["--model", self.model, "--steps", str(max_steps)]
        if self.workload == "sleep":
            return HERE / "exchange_script.py", [*arguments, "--sleep-s", str(SLEEP_S[self.model])]
        return HERE / "training_script.py", [*arguments, "--batch-size", str(BATCH_SIZE[self.model])]

    def step_s(self, result: Result) -> tuple[float, float, float]:
        """Of a result, while all workers were at it: the median over workers, and the lowest and the highest.

        Raises:
            RuntimeError: some were through before others had warmed up.
        """
        ends_s: dict[int, list[float]] = {}
        for step in result.steps:
            if not (step.worker == 0 and self.is_asynchronous and self.num_servers == 1):
                ends_s.setdefault(step.worker, []).append(step.time_s)
        num_warmup = NUM_WARMUP[self.model]
        if any(len(own_s) <= num_warmup for own_s in ends_s.values()):
            raise RuntimeError(f"{self.label}: a worker took no step beyond those that warm up")
        began_s, ended_s = max(own_s[num_warmup - 1] for own_s in ends_s.values()), min(s[-1] for s in ends_s.values())
        if began_s >= ended_s:
            raise RuntimeError(f"{self.label}: workers were not at it together")
        steps_s = [(ended_s - began_s) / _steps_between(began_s, ended_s, own_s) for own_s in ends_s.values()]
        return statistics.median(steps_s), min(steps_s), max(steps_s)


def _steps_between(began_s: float, ended_s: float, ends_s: Sequence[float]) -> float:
    """How many, and parts of them, a worker took whose steps ended at `ends_s`."""
    first, last = np.interp([began_s, ended_s], ends_s, range(len(ends_s)))
    return float(last - first)


@dataclass(frozen=True)
class Row:
    """What came of a cell; of several runs, the middle one's."""

    cell: Cell
    measured_s: float
    lowest_s: float
    """Of its workers."""
    highest_s: float
    predicted_s: float = math.nan
    runs_s: tuple[float, ...] = ()
    """What each run measured."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def grid(args: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for, each once, in the order in which they are measured."""
    cells = []
    for name in args.strategies:
        strategy, _, servers = name.partition(":")
        for num_hosts, rate_mbit, model in itertools.product(args.hosts, args.rates, args.models):
            count = num_hosts if servers == "n" else int(servers or 0)
            if count <= num_hosts:
                cells.append(Cell(rate_mbit, model, args.workload, num_hosts, strategy, count))
    # To a small model, a slow link is hardly another one.
    return sorted(dict.fromkeys(cells), key=lambda c: c.model == "convnet" and c.rate_mbit < max(args.rates))


def held_out() -> list[Cell]:
    """Cells that are none of the documented grid's, those that compute among them."""
    workloads = [(model, workload) for workload in ("sleep", "compute") for model in SLEEP_S]
    cells = [
        Cell(rate_mbit, model, workload, num_hosts, strategy, num_servers)
        for num_hosts, rate_mbit, (model, workload) in itertools.product(HELD_OUT_HOSTS, HELD_OUT_MBIT, workloads)
        for strategy in ("ring", "ps-bsp", "ps-asp")
        for num_servers in ((0,) if strategy == "ring" else (1, num_hosts))
    ]
    assert all(cell.is_held_out for cell in cells)
    return cells


def missed(rows: Sequence[Row], cells: Sequence[Cell]) -> list[str]:
    """What of the promise does not hold on these cells; a cell without a number is one of which nothing is known."""
    known = [row for row in rows if row.cell in set(cells) and math.isfinite(row.error)]
    said = [f"{len(cells) - len(known)} of {len(cells)} cells have no number"] * (len(known) < len(cells))
    if known:
        found = summary_of(known)
        for name, bound in (("median", MEDIAN_BOUND), ("worst", WORST_BOUND)):
            if found[name] > bound:
                said.append(f"the {name} error is {found[name]:.1%}, more than {bound:.0%}")
    return said


# --- prediction ------------------------------------------------------------------------------------------------------


def probed(net: Network, ray: str, cell: Cell) -> str:
    """The file that a probe of the two hosts of `net` writes."""
    net.limit(cell.rate_mbit)
    out = net.directory / "cluster.toml"
    script, arguments = cell.script(NUM_WARMUP[cell.model] + 10 * NUM_PROBED_STEPS)
    command = [PACELINE, "probe", str(script), "--address", ray, "--out", str(out), "--force"]
    command += ["--steps", str(NUM_PROBED_STEPS), "--max-time", "6", "--", *arguments]
    net.run(net.hosts[0], command, timeout_s=TIMEOUT_S)
    return out.read_text(encoding="utf-8")


def enlarged(text: str, *, num_hosts: int) -> Cluster:
    """The cluster with so many hosts, which are known to be alike and to be parts of this machine."""
    cluster = cluster_file.parse(text, where="the probe's file")
    middle = {
        name: statistics.median(getattr(hosts, name) for hosts in cluster.hosts)
        for name in ("bandwidth_gbit_per_s", "latency_us", "memory_gbyte_per_s")
    }
    hosts = replace(cluster.hosts[0], name="host", count=num_hosts, speed=1.0, up_gbit_per_s=None, **middle)
    return replace(cluster, hosts=(hosts,), shared_cores=len(os.sched_getaffinity(0)))


def predicted_s(cell: Cell, cluster_text: str) -> float:
    """Seconds a step on the virtual engine."""
    script, arguments = cell.script(cell.max_steps)
    with tempfile.TemporaryDirectory() as directory:
        result = paceline.run(
            script,
            strategy="all-reduce" if cell.strategy == "ring" else cell.strategy,
            workers=cell.num_hosts,
            options=cell.options,
            arguments=arguments,
            engine="virtual",
            cluster=enlarged(cluster_text, num_hosts=cell.num_hosts),
            device="cpu",
            max_time_s=cell.max_time_s,
            watcher=Quiet(),
            out=Path(directory) / "run",
        )
        return cell.step_s(result)[0]


# --- measurement -----------------------------------------------------------------------------------------------------


def measured(net: Network, ray: str, cell: Cell) -> tuple[float, float, float]:
    """As `Cell.step_s`, of a real run."""
    script, arguments = cell.script(cell.max_steps)
    with tempfile.TemporaryDirectory(dir=net.directory) as directory:
        out = Path(directory) / "run"
        command = [
            PACELINE,
            "run",
            str(script),
            "--strategy",
            "all-reduce" if cell.strategy == "ring" else cell.strategy,
        ]
        command += ["--workers", str(cell.num_hosts), "--address", ray, "--device", "cpu", "--out", str(out)]
        command += ["--max-time", str(cell.max_time_s)] if cell.max_time_s is not None else []
        command += [word for name, value in cell.options.items() for word in ("--option", f"{name}={value}")]
        net.limit(OPEN_MBIT)
        process = net.start(net.hosts[0], [*command, "--", *arguments])
        try:
            # Only training meets the limit: large models take long to be handed out and to be saved.
            _until(process, lambda: '"training"' in _read(out / "events.jsonl"), timeout_s=TIMEOUT_S)
            net.limit(cell.rate_mbit)
            is_timed = partial(_is_timed, cell, out, began_s=time.monotonic())
            _until(process, is_timed, timeout_s=TIMEOUT_S + (cell.max_time_s or 0.0))
            net.limit(OPEN_MBIT)
            _, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"{cell.label} failed:\n{errors[-3000:]}")
        return cell.step_s(Result.open(out))


def _is_timed(cell: Cell, out: Path, *, began_s: float) -> bool:
    """Whether a run that began to train at `began_s` has taken the steps that are asked about."""
    if cell.max_time_s is not None:
        return time.monotonic() > began_s + cell.max_time_s + 2 * cell.link_s  # the last steps end later
    return _read(out / "steps.csv").count("\n") > cell.num_hosts * cell.max_steps


def _until(process: subprocess.Popen[str], is_so: Callable[[], bool], *, timeout_s: float) -> None:
    """Until something is so, or the process has ended."""
    give_up_s = time.monotonic() + timeout_s
    while process.poll() is None and not is_so():
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"a run took longer than {timeout_s:g} s")
        time.sleep(0.05)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


# --- the whole -------------------------------------------------------------------------------------------------------


def probe_all(cells: Sequence[Cell], clusters: dict[str, str]) -> Iterator[str]:
    """Probe what has not been probed, each on two hosts; yields the names of what was."""
    missing = {cell.probe: cell for cell in cells if cell.probe not in clusters}
    if not missing:
        return
    with network(2) as net:
        ray = net.start_ray()
        for name, cell in missing.items():
            began_s = time.monotonic()
            clusters[name] = probed(net, ray, cell)
            say(f"probed {name} in {time.monotonic() - began_s:.0f} s")
            yield name


def measure_all(cells: Sequence[Cell], *, num_runs: int, until_s: float) -> Iterator[Row]:
    """Each number of hosts on a network of its own, whose hosts take turns at the machine's cores.

    A row comes again with each of its runs.
    """
    for num_hosts in sorted({cell.num_hosts for cell in cells}):
        rows: dict[Cell, list[Row]] = {cell: [] for cell in cells if cell.num_hosts == num_hosts}
        for row in _measure_on([*rows] * num_runs, num_hosts, until_s=until_s):
            runs = rows[row.cell]
            runs.append(row)
            middle = sorted(runs, key=lambda run: run.measured_s)[(len(runs) - 1) // 2]
            yield replace(middle, runs_s=tuple(run.measured_s for run in runs))


def _measure_on(cells: Sequence[Cell], num_hosts: int, *, until_s: float) -> Iterator[Row]:
    if time.monotonic() > until_s:
        say(f"no time left for {num_hosts} hosts")
        return
    with network(num_hosts) as net:
        ray = net.start_ray()
        for cell in cells:
            began_s, began_core_s = time.monotonic(), time.process_time()
            if began_s > until_s:
                say(f"no time left for {cell.label}")
                continue
            try:
                row = Row(cell, *measured(net, ray, cell))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                say(f"{cell.label}: {error}")  # the others are worth having
                continue
            took_s = time.monotonic() - began_s
            core = (time.process_time() - began_core_s) / took_s  # which the hosts have not
            say(f"{cell.label}: {row.measured_s:.3f} s; took {took_s:.0f} s, and {core:.0%} of a core to watch")
            yield row


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="Seconds of a step", title_justify="left")
    headings = ("Mbit/s", "model", "workload", "hosts", "strategy", "servers", "predicted", "measured", "runs", "error")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("model", "workload", "strategy") else "right")
    for row in rows:
        cell = row.cell
        table.add_row(
            f"{cell.rate_mbit:g}",
            cell.model,
            cell.workload,
            str(cell.num_hosts),
            cell.strategy,
            str(cell.num_servers or "-"),
            f"{row.predicted_s:.4f}",
            f"{row.measured_s:.4f}",
            f"{min(row.runs_s):.4f} to {max(row.runs_s):.4f}" if len(row.runs_s) > 1 else "1",
            f"{row.error:+.1%}",
        )
    return table


def summary_of(rows: Sequence[Row]) -> dict[str, float]:
    """Of the errors' absolute values."""
    errors = [abs(row.error) for row in rows]
    return {"rows": len(rows), "median": statistics.median(errors), "worst": max(errors)}


def draw(rows: Sequence[Row], directory: Path) -> None:
    """Measured against predicted, one chart for all, a colour for each strategy."""
    names = sorted({row.cell.strategy for row in rows})
    series = [Series(name, [(r.measured_s, r.predicted_s) for r in rows if r.cell.strategy == name]) for name in names]
    chart = scatter_chart(series, title="Seconds of a step", x_label="measured", y_label="predicted", tolerance=0.2)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "prediction.svg").write_text(chart, encoding="utf-8")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load(path: Path | None) -> tuple[dict[str, str], dict[Cell, Row]]:
    """Probes and rows of earlier runs; none if there is no such file."""
    if path is None or not path.exists():
        return {}, {}
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row(**{**row, "cell": Cell(**row["cell"])}) for row in report["rows"]]
    return report["clusters"], {row.cell: row for row in rows}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    strategies = ["ring", "ps-bsp:n", "ps-asp:1", "ps-bsp:1", "ps-asp:n", "ps-bsp:2", "ps-asp:2"]
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="numbers of hosts")
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 1000], metavar="MBIT", help="Mbit/s of a link")
    parser.add_argument("--models", nargs="+", choices=list(SLEEP_S), default=list(SLEEP_S))
    parser.add_argument("--workload", choices=["sleep", "compute"], default="sleep")
    parser.add_argument("--strategies", nargs="+", choices=strategies, default=strategies, metavar="NAME[:SERVERS]")
    parser.add_argument("--held-out", action="store_true", help="cells beyond the documented grid, instead; then judge")
    parser.add_argument("--list", action="store_true", help="show the cells, and do nothing")
    parser.add_argument("--longest-step", type=float, default=60.0, metavar="S", help="leave slower cells out")
    parser.add_argument("--runs", type=int, default=1, choices=[1, 3, 5, 7], help="of a cell; the middle one counts")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further measurement after so long")
    parser.add_argument("--json", type=Path, help="keep the numbers, and the probes' files, here")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw predicted against measured")
    parser.add_argument("--no-measurement", action="store_true", help="only predict what the JSON file holds")
    parser.add_argument("--no-prediction", action="store_true", help="only measure")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    asked = held_out() if args.held_out else grid(args)
    if args.list:
        print(*(cell.label for cell in asked), sep="\n")
        return
    clusters, rows = load(args.json)
    began_s = time.monotonic()

    def keep() -> None:
        if args.json:
            report = {"clusters": clusters, "rows": [asdict(row) for row in rows.values()], "torch": torch.__version__}
            args.json.write_text(json.dumps({**report, "machine": describe_machine()}, indent=1), encoding="utf-8")

    if not args.no_measurement:
        for cell in asked:
            if cell.link_s > args.longest_step:
                say(f"left out, as a step takes {cell.link_s:.0f} s and more: {cell.label}")
        cells = [cell for cell in asked if cell.link_s <= args.longest_step]
        for _ in probe_all(cells, clusters):
            keep()
        for row in measure_all(cells, num_runs=args.runs, until_s=began_s + 60 * args.minutes):
            rows[row.cell] = row
            keep()
        say(f"took {time.monotonic() - began_s:.0f} s")
    if args.no_prediction:
        return
    for cell, row in rows.items():
        try:
            rows[cell] = replace(row, predicted_s=predicted_s(cell, clusters[cell.probe]))
        except RuntimeError as error:
            say(f"{cell.label}, predicted: {error}")  # the others are worth having
            rows[cell] = replace(row, predicted_s=math.nan)
            continue
        say(f"{cell.label}: predicted {rows[cell].predicted_s:.3f} s, measured {row.measured_s:.3f} s")
    keep()
    shown = sorted(
        (row for row in rows.values() if not math.isnan(row.predicted_s)),
        key=lambda row: (row.cell.workload, row.cell.rate_mbit, row.cell.model, row.cell.num_hosts),
    )
    workloads = sorted({row.cell.workload for row in shown})
    errors = {name: summary_of([row for row in shown if row.cell.workload == name]) for name in workloads}
    if args.figures:
        draw(shown, args.figures)
    tell([table_of(shown)], {"errors": errors})
    if args.held_out:
        sys.exit("; ".join(missed(shown, asked)) or None)


if __name__ == "__main__":
    main()
