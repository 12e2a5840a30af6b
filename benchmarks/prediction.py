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
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from namespaces import Network, network
from plots import Series, scatter_chart
from prediction_cells import NUM_WARMUP, SLEEP_S, Cell, Row, grid, held_out, missed, summary_of
from report import tell
from rich.table import Table

import paceline
from paceline.cluster import reading as cluster_file
from paceline.cluster.description import Cluster
from paceline.running.launch import Quiet
from paceline.running.manifest import describe_machine
from paceline.running.result import Result

PACELINE = str(Path(sys.executable).parent / "paceline")
NUM_PROBED_STEPS = 20
OPEN_MBIT = 20_000.0
TIMEOUT_S = 300.0


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
