"""The recipe on the full CIFAR-10 under all five strategies, as the command line runs it; prints a Markdown table.

The one-layer conv net for 1,000 iterations, then ResNet-18 for a few. Iterations are counted as the literature counts
them, so an asynchronous iteration is one worker's batch and a synchronous one is all workers'.

    PACELINE_DATA=... python benchmarks/cifar10.py --workers 4
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import paceline

RECIPE = Path(__file__).parents[1] / "recipes" / "cifar10.py"
STRATEGIES = ("single", "all-reduce", "ps-bsp", "ps-ssp", "ps-asp")


def run(strategy: str, workers: int, out: Path, steps: int, script_arguments: list[str]) -> paceline.Result:
    """`paceline run` as a user types it."""
    command = [shutil.which("paceline", path=str(Path(sys.executable).parent)) or "paceline", "run", str(RECIPE)]
    command += ["--strategy", strategy, "--workers", str(workers), "--max-steps", str(steps), "--device", "cpu"]
    command += ["--out", str(out), "--", *script_arguments]
    print(" ".join(command), file=sys.stderr)
    subprocess.run(command, check=True)
    return paceline.Result.open(out)


def row(model: str, result: paceline.Result) -> str:
    shares = result.shares
    staleness = [update.staleness for update in result.updates]
    cells = (
        model,
        result.manifest["strategy"]["name"],
        str(result.manifest["num_workers"]),
        f"{result.iteration:,}",
        f"{result.samples:,}",
        f"{result.training_time_s:.1f} s",
        f"{result.samples_per_s:,.0f}",
        f"{result.metrics['accuracy']:.1%}",
        f"{sum(staleness) / len(staleness):.2f}" if staleness else "-",
        *(f"{shares[name]:.0%}" for name in ("compute", "communication", "waiting")),
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="of every strategy but single")
    parser.add_argument("--steps", type=int, default=1000, help="iterations of the conv net")
    parser.add_argument("--resnet-steps", type=int, default=8, help="iterations of ResNet-18; 0 leaves it out")
    parser.add_argument("--lr", default="0.01")
    args = parser.parse_args()
    runs = [("convnet", args.steps, ["--model", "convnet", "--lr", args.lr])]
    if args.resnet_steps:
        small = ["--model", "resnet18", "--lr", args.lr, "--batch-size", "16", "--eval-samples", "500"]
        runs.append(("resnet18", args.resnet_steps, small))
    headings = "model,strategy,workers,iterations,samples,time,samples/s,accuracy,staleness,compute,comm.,waiting"
    print("| " + headings.replace(",", " | ") + " |\n" + "|---|---" + "|--:" * 10 + "|")
    for model, steps, script_arguments in runs:
        for strategy in STRATEGIES:
            with tempfile.TemporaryDirectory() as directory:
                workers = 1 if strategy == "single" else args.workers
                result = run(strategy, workers, Path(directory) / "run", steps, script_arguments)
                print(row(model, result), flush=True)


if __name__ == "__main__":
    main()
