"""What a step takes under all-reduce, local SGD and Streaming DiLoCo, against bandwidth: the figure of local updates.

    python benchmarks/bandwidth.py --out docs/figures

Closed forms of the planner: 8 workers on hosts of their own, 45 MB of parameters (ResNet-18), a second of computing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from plots import Series, line_chart

from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.planner import StepWork, predict

WORKERS, STEP_S = 8, 1.0
TENSOR_BYTES = (750_000,) * 60
GBIT_PER_S = (0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
LINES = {
    "all-reduce": ("all-reduce", {}),
    "local-sgd, H = 10": ("local-sgd", {"every": 10}),
    "local-sgd, H = 50": ("local-sgd", {"every": 50}),
    "diloco, H = 50, 10 fragments, delay 1": ("diloco", {"every": 50, "fragments": 10, "delay": 1}),
}


def step_s(strategy: str, options: dict[str, int], gbit_per_s: float) -> float:
    hosts = Hosts(count=WORKERS, bandwidth_gbit_per_s=gbit_per_s, latency_us=100.0)
    cluster = Cluster(hosts=(hosts,), compute=Compute(step_s=STEP_S, distribution="log-normal", variation=0.05))
    work = StepWork(tensor_bytes=TENSOR_BYTES, samples=100)
    return predict(cluster, strategy=strategy, options=options, workers=WORKERS, work=work).step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    args = parser.parse_args()
    series = []
    for label, (strategy, options) in LINES.items():
        points = [(rate, step_s(strategy, options, rate)) for rate in GBIT_PER_S]
        series.append(Series(label, points))
        print(label.ljust(40), *(f"{seconds:.2f}" for _, seconds in points))
    title = "A step of ResNet-18 on 8 workers"
    chart = line_chart(series, title=title, x_label="Gbit/s of each worker's card", y_label="seconds a step")
    (args.out / "local-updates.svg").write_text(chart)


if __name__ == "__main__":
    main()
