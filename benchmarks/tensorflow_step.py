"""What one step of the conv net of `tensorflow_strategies.py` takes of a core, in one process with one thread: in plain
PyTorch, in PyTorch with channels last, in Paceline's loop, and in TensorFlow.

    python benchmarks/tensorflow_step.py --tensorflow PYTHON --rounds 3

PYTHON is the interpreter of an environment with tensorflow and tf-keras. What a core spends is counted, not what passes
meanwhile, so that it matters less who else has the cores. All contenders run one after another in every round.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
from report import tell
from rich.table import Table
from rounds import ratio_of
from tensorflow_strategies import PEER, RECIPES, write_data
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.data import collate, load

NUM_STEPS, WARM_UP_STEPS, BATCH_SIZE = 200, 30, 64
OWN = ("PyTorch", "PyTorch, channels last", "Paceline, one worker")


def step_ms(contender: str) -> float:
    """Milliseconds of a core a step, loading of the batch included."""
    sys.path.insert(0, RECIPES)
    data = load("mnist")
    order = torch.channels_last if contender == OWN[1] else torch.contiguous_format
    model = importlib.import_module("mnist_mirrored").make_model(data.shape, data.num_classes).to(memory_format=order)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    loader = DataLoader(data.train, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    if contender == OWN[2]:
        model, optimizer, loader = paceline.init().prepare(model, optimizer, loader)
    torch.set_num_threads(1)
    began_s = 0.0
    for number, (x, y) in enumerate(islice(loader, NUM_STEPS + WARM_UP_STEPS)):
        if number == WARM_UP_STEPS:
            began_s = time.process_time()
        optimizer.zero_grad()
        F.cross_entropy(model(x.contiguous(memory_format=order)), y).backward()
        optimizer.step()
    return (time.process_time() - began_s) / NUM_STEPS * 1e3


def told_by(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["step_ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow", help="a Python with tensorflow and tf-keras", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contender", choices=OWN, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender is not None:
        print(json.dumps({"step_ms": step_ms(args.contender)}))
        return
    if args.tensorflow is None:
        parser.error("--tensorflow is missing")
    found: dict[str, list[float]] = {name: [] for name in (*OWN, "TensorFlow")}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "data.npz")
        write_data(path, "mnist")
        commands = {name: [sys.executable, __file__, "--contender", name] for name in OWN}
        steps = [str(BATCH_SIZE), str(NUM_STEPS + WARM_UP_STEPS)]
        commands["TensorFlow"] = [args.tensorflow, str(PEER), "step", "1", str(path), *steps]
        for number in range(args.rounds):
            for name, command in commands.items():
                found[name].append(told_by(command))
                print(f"round {number + 1}/{args.rounds} {name}: {found[name][-1]:.2f} ms", file=sys.stderr, flush=True)
    tell([table_of(found)], {"rounds": args.rounds})


def table_of(found: dict[str, list[float]]) -> Table:
    table = Table("one process, one thread", title="A step, in milliseconds of a core", box=None)
    for heading in ("ms", "lowest to highest", "of PyTorch's"):
        table.add_column(heading, justify="right")
    for name, values in found.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        table.add_row(name, f"{statistics.median(values):.1f}", spread, ratio_of(values, found[OWN[0]]))
    return table


if __name__ == "__main__":
    main()
