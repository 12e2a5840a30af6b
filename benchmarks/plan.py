"""How long planning takes: every strategy on 10,000 workers, in closed form and simulated.

    python benchmarks/plan.py --workers 10000 --steps 100

Simulated is what `paceline.planner.simulator` says of itself: exchanges without tensors, in aggregate. On one core.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from paceline.cluster import reading as cluster_file
from paceline.planner import StepWork, predict
from paceline.planner.simulator import simulate

STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("single", {}),
    ("all-reduce", {}),
    ("ring", {}),
    ("all-reduce", {"algorithm": "tree"}),
    ("all-reduce", {"algorithm": "halving-doubling"}),
    ("all-reduce", {"algorithm": "reduce-broadcast"}),
    ("all-reduce", {"algorithm": "all-to-all"}),
    ("ps-bsp", {"servers": 100}),
    ("ps-bsp", {"servers": 100, "backup_workers": 100}),
    ("ps-ssp", {"servers": 100}),
    ("ps-asp", {"servers": 100}),
)
RESNET_50 = StepWork(tensor_bytes=(640_000,) * 160, samples=32, forward_flop=32 * 8.2e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="data-centre-10000")
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    cluster = cluster_file.load(arguments.cluster)
    print(
        f"{arguments.workers:,} workers x {arguments.steps} steps on {arguments.cluster}; seconds of processor time\n"
    )
    print("| strategy | step, s | simulated, s | deviation | closed form took | simulation took |")
    print("|---|--:|--:|--:|--:|--:|")
    for strategy, options in STRATEGIES:
        workers = 1 if strategy == "single" else arguments.workers
        given: dict[str, Any] = {"strategy": strategy, "workers": workers, "work": RESNET_50, "options": options}
        began_s = time.process_time()
        predicted_s = predict(cluster, **given).step_s
        between_s = time.process_time()
        simulated_s = simulate(cluster, **given, steps=arguments.steps).step_s
        ended_s = time.process_time()
        label = ", ".join([strategy, *(f"{key}={value}" for key, value in options.items())])
        print(
            f"| {label} | {predicted_s:.4g} | {simulated_s:.4g} | {predicted_s / simulated_s - 1:+.1%} "
            f"| {between_s - began_s:.2f} | {ended_s - between_s:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
