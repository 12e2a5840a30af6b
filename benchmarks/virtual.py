"""What simulating costs: virtual workers of the conv net against the pure computing of their gradients.

    python benchmarks/virtual.py --workers 20 --strategies all-reduce,ps-bsp,ps-asp

Both sides compute forward and backward passes of batches of 100, of as many images as CIFAR-10 has. Pure are three:

    again    one model's, of one batch again and again, which the caches hold
    own      the workers' own: each has its model, and its next batch lies ready in memory
    batches  as "again", of batches that a DataLoader shuffles and takes

The virtual run takes batches, updates, exchanges and writes records. The sides take turns. The
least of all turns is printed, as what else the machine does only adds; and of the turns' ratios the median, with
quartiles.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader

import paceline
from paceline.data import collate
from paceline.data.dataset import Batch, Split
from paceline.models import build

SIDES = ("again", "own", "batches")
BATCH_SIZE, NUM_STEPS, NUM_ROUNDS = 100, 25, 12
LEARNING_RATE = 1e-3
"""With 0.05, twenty asynchronous workers that learn noise diverge within 60 steps."""
NUM_IMAGES = 50_000
"""Twenty workers then have 25 batches an epoch: each turn is one epoch, with what an epoch begins with."""


def images(count: int) -> Split:
    """Noise in CIFAR-10's shape."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return Split(pixels, labels, torch.full((3, 1, 1), 128.0), torch.full((3, 1, 1), 64.0))


def script(model_name: str, split: Split, directory: Path) -> None:
    """Notes its gradients, when its first step began, and the last one ended."""
    worker = paceline.init()
    num_gradients, began_s, ended_s = 0, math.inf, -math.inf
    model = build(model_name)
    loader = DataLoader(split, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=LEARNING_RATE), loader)
    try:
        while True:
            for x, y in loader:
                began_s = min(began_s, time.perf_counter())
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                num_gradients += 1
                ended_s = time.perf_counter()
    finally:
        (directory / f"{worker.rank}.stamps").write_text(f"{num_gradients} {began_s} {ended_s}")


def again_s(model_name: str, split: Split, num_gradients: int) -> float:
    """Seconds a gradient of one batch."""
    batch = split[torch.arange(BATCH_SIZE)]
    return _gradient_s([build(model_name)], itertools.repeat(batch), num_gradients)


def own_s(model_name: str, split: Split, num_gradients: int, *, workers: int) -> float:
    """Seconds a gradient of so many workers in turn, whose batches lie ready."""
    ready = [split[rows] for rows in torch.randperm(len(split)).split(BATCH_SIZE)[:num_gradients]]
    return _gradient_s([build(model_name) for _ in range(workers)], itertools.cycle(ready), num_gradients)


def batches_s(model_name: str, split: Split, num_gradients: int) -> float:
    """Seconds a gradient, and the batch that a loader takes for it."""
    loader = DataLoader(split, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    return _gradient_s([build(model_name)], batches, num_gradients)


def _gradient_s(models: Sequence[nn.Module], batches: Iterable[Batch], num_gradients: int) -> float:
    began_s = time.perf_counter()
    for model, (x, y) in zip(itertools.cycle(models), itertools.islice(batches, num_gradients), strict=False):
        for parameter in model.parameters():
            parameter.grad = None
        F.cross_entropy(model(x), y).backward()
    return (time.perf_counter() - began_s) / num_gradients


def virtual_s(
    model_name: str,
    split: Split,
    strategy: str,
    workers: int,
    cluster: str,
    *,
    num_gradients: int,
) -> float:
    """Seconds a gradient, from the first step to the last of a virtual run of so many gradients.

    Asynchronous workers have computed some more when the run's last update is made, most often one each but for the
    last one; these count, too.
    """
    is_asynchronous = strategy in ("ps-asp", "ps-ssp")
    max_steps = num_gradients if is_asynchronous else num_gradients // workers
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        result = paceline.run(
            lambda: script(model_name, split, directory),
            strategy=strategy,
            workers=workers,
            engine="virtual",
            cluster=cluster,
            max_steps=max_steps,
            device="cpu",
            out=directory / "run",
        )
        assert len(result.steps) >= num_gradients
        stamps = [[float(word) for word in path.read_text().split()] for path in directory.glob("*.stamps")]
    counts, began_s, ended_s = zip(*stamps, strict=True)
    return float((max(ended_s) - min(began_s)) / sum(counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--strategies", default="all-reduce,ps-bsp,ps-asp")
    parser.add_argument("--cluster", default="commodity-10gbe")
    parser.add_argument(
        "--threads", default=f"1,{torch.get_num_threads()}", help="of torch's, for all sides (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of each worker")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    given = parser.parse_args()
    split = images(NUM_IMAGES)
    print(f"{given.model}, {given.workers} virtual workers: least ms a gradient")
    print("Ratios: of the least, then the median of the turns' own (lower and upper quartile)")
    times, ratios = (f"{side:>7}" for side in (*SIDES, "virtual")), [f"{f'of {side}':<25}" for side in SIDES]
    print(f"{'threads':>7} {'strategy':<12}", *times, *ratios)
    all_threads = sorted({int(number) for number in given.threads.split(",")})
    for num_threads, strategy in itertools.product(all_threads, given.strategies.split(",")):
        torch.set_num_threads(num_threads)
        turns = [_turn(given, split, strategy) for _ in range(given.rounds)]
        least = [1e3 * min(each) for each in zip(*turns, strict=True)]
        ratios = [_ratio(least[-1] / least[i], [turn[-1] / turn[i] for turn in turns]) for i in range(len(SIDES))]
        print(f"{num_threads:>7} {strategy:<12}", *(f"{time_ms:7.2f}" for time_ms in least), *ratios, flush=True)


def _turn(given: argparse.Namespace, split: Split, strategy: str) -> tuple[float, ...]:
    """Seconds a gradient: of the pure sides, and of the virtual run."""
    model, workers = given.model, given.workers
    num_gradients = workers * given.steps
    return (
        again_s(model, split, num_gradients),
        own_s(model, split, num_gradients, workers=workers),
        batches_s(model, split, num_gradients),
        virtual_s(
            model,
            split,
            strategy,
            workers,
            given.cluster,
            num_gradients=num_gradients,
        ),
    )


def _ratio(least: float, turns: list[float]) -> str:
    low, median, high = statistics.quantiles(turns, n=4) if len(turns) > 1 else turns * 3
    return f"{least:4.2f}, {median:4.2f} ({low:4.2f} to {high:4.2f})  "


if __name__ == "__main__":
    main()
