"""Speed-up against workers on simulated hosts: a ring beside parameter servers, of which there are 1, 2, 4 or as many
as workers. The figure of docs/horovod.md.

    python benchmarks/servers_or_ring.py

Simulated is the exchange of a model of ResNet-50's size, a worker a host, by `paceline.planner.simulator`. Servers are
on hosts of their own, unless there are as many as workers: these share the workers' hosts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from plots import Series, line_chart

from paceline.cluster.description import Cluster, Compute, Hosts, Servers
from paceline.planner import StepWork
from paceline.planner.simulator import simulate

WORKERS = (1, 4, 8, 16, 24, 32, 48, 64)
SERVERS = (1, 2, 4)
STEP_S, GBIT_PER_S, LATENCY_US = 0.5, 10.0, 30.0
WORK = StepWork(tensor_bytes=(640_000,) * 160, samples=32)


def samples_per_s(strategy: str, *, workers: int, servers: int = 0, shares_hosts: bool = False) -> float:
    count = workers if shares_hosts else workers + servers
    cluster = Cluster(
        hosts=(Hosts(count=count, bandwidth_gbit_per_s=GBIT_PER_S, latency_us=LATENCY_US),),
        compute=Compute(step_s=STEP_S, distribution="log-normal", variation=0.05),
        servers=Servers(placement="with workers" if shares_hosts else "separate"),
    )
    options = {"servers": servers} if servers else {}
    return simulate(cluster, strategy=strategy, workers=workers, work=WORK, options=options).samples_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    args = parser.parse_args()
    one = samples_per_s("single", workers=1)
    several = WORKERS[1:]
    rates = {"ring": [samples_per_s("ring", workers=count) for count in several]}
    for servers in SERVERS:
        name = f"{servers} server{'s' if servers > 1 else ''}"
        rates[name] = [samples_per_s("ps-bsp", workers=count, servers=servers) for count in several]
    rates["as many servers"] = [
        samples_per_s("ps-bsp", workers=count, servers=count, shares_hosts=True) for count in several
    ]
    series = [Series("as many times as fast", [(count, count) for count in WORKERS])]
    print("workers".ljust(20), *(f"{count:6}" for count in several))
    for name, found in rates.items():
        speed_ups = [rate / one for rate in found]
        series.append(Series(name, [(1, 1.0), *zip(several, speed_ups, strict=True)]))
        print(name.ljust(20), *(f"{speed_up:6.1f}" for speed_up in speed_ups))
    title = f"Speed-up of a model of 102 MB, {GBIT_PER_S:g} Gbit/s, {STEP_S:g} s of computing a step"
    chart = line_chart(series, title=title, x_label="workers, each on its host", y_label="times one worker")
    (args.out / "servers-or-ring.svg").write_text(chart, encoding="utf-8")


if __name__ == "__main__":
    main()
