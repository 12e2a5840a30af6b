"""The conv net of TensorFlow's tutorials on MNIST, by TensorFlow's strategies and by those of the same names here:
samples per second of training, and the share of the test images that the trained model knows.

    python benchmarks/tensorflow_strategies.py --tensorflow PYTHON --workers 2 --epochs 2 --rounds 3

PYTHON is the interpreter of an environment with tensorflow and tf-keras, which do not load beside torch. All contenders
run one after another in every round; the table has medians, and ratios within a round with their spread.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from report import tell
from rich.table import Table
from rounds import ratio_of

from paceline.compat import strategies
from paceline.data import load
from paceline.running.launch import Quiet

RECIPES = str(Path(__file__).parents[1] / "recipes")
PEER = Path(__file__).parent / "peers" / "tensorflow_mnist.py"
WARM_UP_STEPS = 50
PAIRS = {
    "OneDeviceStrategy": "one-device",
    "MirroredStrategy": "mirrored",
    "MultiWorkerMirroredStrategy": "multi-worker",
    "ParameterServerStrategy": "parameter-server",
}
Outcome = tuple[float, float]
"""Samples a second, accuracy."""


def write_data(path: Path, dataset: str) -> None:
    """What TensorFlow's side reads: images [N, H, W, C] as float32, labels as int64."""
    data = load(dataset)
    parts = {}
    for name, part in (("train", data.train), ("test", data.test)):
        images, labels = part[:]
        parts[f"{name}_x"] = np.ascontiguousarray(images.permute(0, 2, 3, 1).numpy())
        parts[f"{name}_y"] = labels.numpy().astype(np.int64)
    np.savez(path, allow_pickle=False, **parts)


def of_tensorflow(python: str, name: str, workers: int, path: Path, batch_size: int, epochs: int) -> Outcome:
    """
    Raises:
        SystemExit: it failed; with the end of what it said.
    """
    command = [python, str(PEER), PAIRS[name], str(workers), str(path), str(batch_size), str(epochs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"TensorFlow's {name} failed:\n{done.stderr[-3000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return told["samples_per_s"], told["accuracy"]


def train(asked: Namespace, strategy: strategies.DistributionStrategy) -> None:
    """What each worker calls: the recipe's own function."""
    sys.path.insert(0, RECIPES)
    importlib.import_module("mnist_mirrored").train(asked, strategy)


def of_paceline(name: str, workers: int, dataset: str, batch_size: int, epochs: int) -> Outcome:
    made: dict[str, Callable[[], strategies.DistributionStrategy]] = {
        "OneDeviceStrategy": lambda: strategies.OneDeviceStrategy("CPU:0"),
        "MirroredStrategy": lambda: strategies.MirroredStrategy(workers=workers),
        "MultiWorkerMirroredStrategy": lambda: strategies.MultiWorkerMirroredStrategy(workers=workers),
        "ParameterServerStrategy": lambda: strategies.ParameterServerStrategy(workers=workers, servers=1),
    }
    strategy = made[name]()
    asked = Namespace(dataset=dataset, epochs=epochs, batch_size=batch_size)
    with tempfile.TemporaryDirectory() as directory:
        result = strategy.run(train, args=(asked, strategy), out=Path(directory, "results"), watcher=Quiet())
        assert result is not None
        steps = sorted(result.steps, key=lambda step: step.time_s)
        counted = steps[WARM_UP_STEPS * strategy.num_workers :]
        began_s = steps[WARM_UP_STEPS * strategy.num_workers - 1].time_s
        rate = sum(step.samples for step in counted) / (counted[-1].time_s - began_s)
        return rate, result.metrics["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow", required=True, help="a Python with tensorflow and tf-keras", metavar="PYTHON")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training images; at most 3")
    parser.add_argument("--batch-size", type=int, default=64, help="images a worker takes for a step")
    parser.add_argument("--dataset", choices=("mnist", "digits"), default="mnist")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=list(PAIRS))
    args = parser.parse_args()
    ours: dict[str, list[Outcome]] = {name: [] for name in args.only}
    theirs: dict[str, list[Outcome]] = {name: [] for name in args.only}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "data.npz")
        write_data(path, args.dataset)
        for number in range(args.rounds):
            for name in args.only:
                workers = 1 if name == "OneDeviceStrategy" else args.workers
                theirs[name].append(of_tensorflow(args.tensorflow, name, workers, path, args.batch_size, args.epochs))
                ours[name].append(of_paceline(name, workers, args.dataset, args.batch_size, args.epochs))
                said = [f"{rate:,.0f} samples/s, {score:.2%}" for rate, score in (theirs[name][-1], ours[name][-1])]
                print(f"round {number + 1}/{args.rounds} {name}: {'; '.join(said)}", file=sys.stderr, flush=True)
    tell([table_of(theirs, ours)], {"epochs": args.epochs, "workers": args.workers, "rounds": args.rounds})


def table_of(theirs: dict[str, list[Outcome]], ours: dict[str, list[Outcome]]) -> Table:
    table = Table("strategy", title="TensorFlow (its) and Paceline (ours)", box=None)
    for heading in ("its samples/s", "ours", "ratio", "its accuracy", "ours"):
        table.add_column(heading, justify="right")
    for name in ours:
        rates = [[rate for rate, _ in outcomes] for outcomes in (theirs[name], ours[name])]
        scores = [_median([score for _, score in outcomes]) for outcomes in (theirs[name], ours[name])]
        ratio = ratio_of(rates[1], rates[0])
        table.add_row(name, *(f"{_median(each):,.0f}" for each in rates), ratio, *(f"{score:.2%}" for score in scores))
    return table


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
