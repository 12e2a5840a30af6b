"""A hundred clients with MNIST, ten a round: Flower's simulation beside `fed-avg` on both engines, and loops that do
nothing but train. Seconds to the first batch, rounds a second, and what a client's turn takes besides its training. Of
that a round's end is the part by which the last turn of a round takes longer than those before it.

    python benchmarks/flower.py --flower PYTHON --rounds 30 --repeats 3
    python benchmarks/flower.py --flower PYTHON --model fedavg-cnn --rounds 4 --repeats 3

PYTHON is the interpreter of an environment with `flwr[simulation]` and torch. Every contender is a process of its own,
one after another in every repeat; the table has medians, and ratios within a repeat with their spread.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from report import tell
from rich.table import Table
from rounds import compile_paceline, ratio_of
from tensorflow_strategies import write_data
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data import collate, load
from paceline.models import build
from paceline.running.launch import Quiet

PEER = Path(__file__).parent / "peers" / "flower_clients.py"
NUM_CLIENTS, FRACTION, BATCH_SIZE, RATE, IMAGES_EACH = 100, 0.1, 10, 0.1, 600
MOST_ROUNDS = 1000
A_ROUND = round(NUM_CLIENTS * FRACTION)
FLOWER, BARE = "Flower", "bare loops"
ENGINES = {"fed-avg on Ray": "ray", "fed-avg, virtual engine": "virtual"}


class Outcome(NamedTuple):
    start_s: float
    """From the command to the first batch; with bare loops, to the first of a process that has loaded torch."""
    rounds_per_s: float
    accuracy: float | None
    round_end_s: float | None = None
    """By so much the last turn of a round takes longer, on the worker that wrote its turns down."""


def of_flower(python: str, model: str, path: Path, rounds: int, workers: int) -> Outcome:
    """
    Raises:
        SystemExit: it failed; with the end of what it said.
    """
    told = json.loads(_output([python, str(PEER), model, str(path), str(rounds), str(workers), str(time.time())]))
    over_s = told["over_s"]
    # The first round loads and warms up.
    return Outcome(told["start_s"], (len(over_s) - 1) / (over_s[-1] - over_s[0]), told["accuracy"])


def of_paceline(engine: str, model: str, rounds: int, workers: int) -> Outcome:
    """In a process that has loaded nothing yet, as a command has not."""
    # The virtual engine is one process, whose two threads would take twice as long for such small operations.
    one_thread = {"OMP_NUM_THREADS": "1"} if engine == "virtual" else {}
    with tempfile.TemporaryDirectory() as directory:
        began_s = time.time()
        command = [sys.executable, __file__, "--play", engine, model, str(rounds), str(workers), directory]
        accuracy = float(_output(command, **one_thread))
        begun_s = [float(line) for line in Path(directory, "turns").read_text().split()]
    a_round = A_ROUND if engine == "virtual" else A_ROUND // workers  # turns of the worker that wrote them down
    first, last = a_round, a_round * (rounds - 1)
    rate = (rounds - 2) / (begun_s[last] - begun_s[first])
    return Outcome(begun_s[0] - began_s, rate, accuracy, round_end_s(begun_s[first : last + 1], a_round))


def round_end_s(begun_s: Sequence[float], a_round: int) -> float | None:
    """Of the times at which turns began, the first of a round first; none where a round is one turn."""
    if a_round == 1:
        return None
    taken_s = [after - before for before, after in pairwise(begun_s)]
    lasts = taken_s[a_round - 1 :: a_round]
    others = [taken for number, taken in enumerate(taken_s) if (number + 1) % a_round]
    return statistics.median(lasts) - statistics.median(others)


def _output(command: Sequence[str], **environment: str) -> str:
    """The last line of what a command says."""
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{Path(command[1]).name} failed:\n{done.stderr[-3000:]}")
    return done.stdout.splitlines()[-1]


def play(engine: str, model: str, rounds: int, workers: int, directory: str) -> None:
    """Print the accuracy; a file gets the time at which each turn of the first worker began."""
    result = paceline.run(
        partial(script, model, Path(directory, "turns")),
        strategy="fed-avg",
        options={"clients": NUM_CLIENTS, "fraction": FRACTION},
        workers=1 if engine == "virtual" else workers,
        engine="virtual" if engine == "virtual" else "ray",
        cluster="lab-1gbe" if engine == "virtual" else None,
        max_steps=rounds,
        eval_every=rounds,
        out=Path(directory, "run"),
        watcher=Quiet(),
    )
    print(result.metrics["accuracy"])


def script(name: str, turns: Path) -> None:
    """What each worker calls."""
    worker, data = paceline.init(), load("mnist")
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loader = DataLoader(data.train, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    test_x, test_y = data.test[:]

    @worker.evaluation
    def accuracy(model: nn.Module) -> dict[str, float]:
        found = torch.cat([model(x).argmax(dim=1) for x in test_x.split(2000)])
        return {"accuracy": float((found == test_y).double().mean())}

    for _ in range(NUM_CLIENTS * MOST_ROUNDS):
        for number, (x, y) in enumerate(loader):
            if not number and worker.rank == 0:
                with turns.open("a") as file:
                    print(time.time(), file=file)
            train(model, optimizer, x, y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def of_bare_loops(model: str, rounds: int, workers: int) -> Outcome:
    """As many turns of clients, divided among processes that do nothing but train."""
    began_s = time.time()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        told = pool.starmap(bare_turns, [(model, rounds * A_ROUND // workers)] * workers, chunksize=1)
    taken_s = max(over_s for _, over_s in told) - min(begun_s for begun_s, _ in told)
    return Outcome(min(begun_s for begun_s, _ in told) - began_s, rounds / taken_s, None)


def bare_turns(name: str, num_turns: int) -> tuple[float, float]:
    """When they began and when they were over."""
    torch.set_num_threads(1)
    images, labels = load("mnist").train[:IMAGES_EACH]
    loader = DataLoader(TensorDataset(images, labels), BATCH_SIZE, shuffle=True)
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    began_s = time.time()
    for _ in range(num_turns):
        for x, y in loader:
            train(model, optimizer, x, y)
    return began_s, time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", required=True, help="a Python with flwr[simulation] and torch", metavar="PYTHON")
    parser.add_argument("--model", choices=("mlp", "fedavg-cnn"), default="mlp")
    parser.add_argument("--workers", type=int, default=2, help="clients that train at a time; 1 on the virtual engine")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if not 3 <= args.rounds <= MOST_ROUNDS or A_ROUND % args.workers:
        parser.error(f"--rounds must be 3 to {MOST_ROUNDS}, and --workers a divisor of {A_ROUND}")
    compile_paceline()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "data.npz")
        write_data(path, "mnist")
        contenders: dict[str, Callable[[], Outcome]] = {
            FLOWER: lambda: of_flower(args.flower, args.model, path, args.rounds, args.workers),
            BARE: lambda: of_bare_loops(args.model, args.rounds, args.workers),
            **{
                name: partial(of_paceline, engine, args.model, args.rounds, args.workers)
                for name, engine in ENGINES.items()
            },
        }
        found: dict[str, list[Outcome]] = {name: [] for name in contenders}
        for number in range(args.repeats):
            for name, measure in contenders.items():
                found[name].append(measure())
                print(f"repeat {number + 1}/{args.repeats} {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    told = {name: [outcome._asdict() for outcome in outcomes] for name, outcomes in found.items()}
    tell([table_of(found, args.workers)], {"model": args.model, "rounds": args.rounds, "found": told})


def table_of(found: dict[str, list[Outcome]], workers: int) -> Table:
    table = Table("contender", title=f"{NUM_CLIENTS} clients, {A_ROUND} a round, batches of {BATCH_SIZE}", box=None)
    for heading in ("start, s", "rounds/s", "of Flower's", "more a turn, ms", "round's end, ms", "accuracy"):
        table.add_column(heading, justify="right")
    rates = {name: [outcome.rounds_per_s for outcome in outcomes] for name, outcomes in found.items()}
    for name, outcomes in found.items():
        cores = 1 if ENGINES.get(name) == "virtual" else workers
        # Bare loops keep all workers' cores busy.
        more_ms = [
            (cores / rate - workers / bare) / A_ROUND * 1e3 for rate, bare in zip(rates[name], rates[BARE], strict=True)
        ]
        ends_ms = [outcome.round_end_s * 1e3 for outcome in outcomes if outcome.round_end_s is not None]
        known = [outcome.accuracy for outcome in outcomes if outcome.accuracy is not None]
        table.add_row(
            name,
            f"{statistics.median(outcome.start_s for outcome in outcomes):.1f}",
            f"{statistics.median(rates[name]):.2f}",
            ratio_of(rates[name], rates[FLOWER]),
            "" if name == BARE else f"{statistics.median(more_ms):.2f} ({min(more_ms):.2f} to {max(more_ms):.2f})",
            f"{statistics.median(ends_ms):.1f}" if ends_ms else "",
            f"{statistics.median(known):.1%}" if known else "",
        )
    return table


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        engine, model, rounds, workers, directory = sys.argv[2:]
        play(engine, model, int(rounds), int(workers), directory)
    else:
        main()
