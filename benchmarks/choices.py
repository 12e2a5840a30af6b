"""What `codec=auto` and plans choose, beside all that they chose among, on slow and on fast links.

    python benchmarks/choices.py

The FedAvg paper's network (6.7 MB) on MNIST, 8 hosts of 32 cores x 8 GFLOP/s on the virtual engine: steps of each codec
are of simulated time, with what coding takes. Runs are kept in `studies/choices`, and are not made again.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from report import tell
from rich.table import Table

import paceline
from paceline.cluster.description import Cluster, Hosts
from paceline.engines.scripting import read_script
from paceline.planner import observing, predict
from paceline.running.launch import Quiet

SCRIPT = Path(__file__).parents[1] / "recipes" / "low_bandwidth" / "train.py"
ARGUMENTS = ("--model", "fedavg-cnn", "--batch-size", "8", "--eval-samples", "100")
WORKERS = 8
CODECS: Mapping[str, str] = {
    "none": "",
    "bf16": "bf16",
    "int8": "int8",
    "powersgd": "powersgd:codec.start=0",
    "top-k": "top-k",
}
AUTOS = ("bf16+int8+powersgd", "top-k", "bf16+int8+powersgd+top-k")


def text_of(codec: str) -> str:
    return f"all-reduce:codec={codec}" if codec else "all-reduce"


def measured(gbit: float, codec: str, *, steps: int, out: Path) -> tuple[float, str]:
    """Seconds of a step in the second half, and what the run says of its codec."""
    kept = out / f"{gbit:g}-{codec or 'none'}-{steps}"
    if not kept.exists():
        shutil.rmtree(out / ".partial", ignore_errors=True)
        paceline.run(
            SCRIPT,
            arguments=[*ARGUMENTS, "--steps", str(steps)],
            strategy=text_of(codec),
            workers=WORKERS,
            engine="virtual",
            cluster=cluster_of(gbit),
            out=out / ".partial",
            watcher=Quiet(),
        )
        (out / ".partial").rename(kept)
    result = paceline.Result.open(kept)
    ends = sorted(step.time_s for step in result.steps if step.worker == 0)
    said = [str(event.details) for event in result.events if event.name == "tuned"]
    return median(after - before for before, after in pairwise(ends[len(ends) // 2 :])), " ".join(said)


def cluster_of(gbit: float) -> Cluster:
    hosts = Hosts(count=WORKERS, cores=32, gflop_per_s=8.0, bandwidth_gbit_per_s=gbit, latency_us=100.0)
    return Cluster(hosts=(hosts,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("studies") / "choices")
    parser.add_argument("--gbit", type=float, nargs="+", default=[10.0, 0.1])
    args = parser.parse_args()
    work = observing.observe(read_script(SCRIPT, ARGUMENTS)).work
    tables = []
    for gbit in args.gbit:
        measure = partial(measured, gbit, steps=args.steps, out=args.out)
        table = Table(title=f"{gbit:g} Gbit/s")
        table.add_column("codec")
        for heading in ("ms a step", "ms planned", "beside the best"):
            table.add_column(heading, justify="right")
        took_s = {name: measure(codec)[0] for name, codec in CODECS.items()}
        for name, codec in CODECS.items():
            planned = predict(cluster_of(gbit), strategy=text_of(codec), workers=WORKERS, work=work).step_s
            beside = took_s[name] / min(took_s.values()) - 1
            table.add_row(f"`{name}`", f"{took_s[name] * 1e3:.2f}", f"{planned * 1e3:.2f}", f"{beside:+.1%}")
        for among in AUTOS:
            step_s, said = measure(f"auto:codec.among={among}")
            best_s = min([took_s["none"], *(took_s[name] for name in among.split("+"))])
            found = re.search(r"codec'?: ['\"]([\w-]+)", said)
            table.add_row(
                f"`auto` of {among}: {found[1] if found else said}",
                f"{step_s * 1e3:.2f}",
                "",
                f"{step_s / best_s - 1:+.1%}",
            )
        tables.append(table)
    tell(tables, {"workers": WORKERS, "steps": args.steps})


if __name__ == "__main__":
    main()
