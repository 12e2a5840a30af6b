"""What keeping records costs a training step.

The one-layer conv net trains under one strategy, and after every block of steps all workers change between the reporter
of a real run, whose records go to the launcher and to disk, and one that drops them: both meet the same model, the same
processes and the same mood of the machine. Steps at a block's beginning are left out, while what the block before it
recorded may still be under way. Blocks come in pairs whose order alternates.

The table gives the difference between the two, as the median over pairs with a 95 % interval from resampling pairs: of
the step's wall time, and of the processor time, as the kernel counts it, that worker 0's control thread and the
launcher take while one step lasts. A noisy machine hides a difference of one per cent on the wall clock; what these two
take is the most that a step can lose to records, but for 1 us in which it makes them.

    python benchmarks/records.py --workers 2 --pairs 24
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.nn.functional as F
from peers.workload import make_model, make_optimizer
from report import tell
from rich.table import Table
from throughput import FixedBatches, whole
from torch.utils.data import DataLoader

import paceline
from paceline.records import NullReporter
from paceline.running.launch import Quiet

BATCH_SIZE = 100
SETTLING_S = 0.7
WARMUP_STEPS = 200
CLOCKS = ("wall clock", "control thread", "launcher", "both, of processor time")
_NUM_RESAMPLES = 2_000

Block = tuple[float, ...]
"""Seconds a step on each of the clocks."""


def processor_s(task: Path) -> float:
    """Seconds for which a thread has run."""
    return int((task / "schedstat").read_text(encoding="utf-8").split()[0]) / 1e9


def clocks(launcher: int) -> Block:
    """All clocks now."""
    name = "paceline-control"
    control = next(thread.native_id for thread in threading.enumerate() if thread.name == name)
    control_s = processor_s(Path(f"/proc/self/task/{control}"))
    launcher_s = sum(map(processor_s, Path(f"/proc/{launcher}/task").iterdir()))
    return time.perf_counter(), control_s, launcher_s, control_s + launcher_s


def train(num_pairs: int, block_s: float, launcher: int, out: str) -> None:
    """One worker: pairs of blocks of as many steps as take `block_s`, one with records and one without."""
    worker = paceline.init()
    model = make_model("convnet")
    optimizer = make_optimizer(model)
    loader = DataLoader(FixedBatches(BATCH_SIZE, seed=worker.rank), batch_size=BATCH_SIZE, collate_fn=whole)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    run = worker._session.run
    reporters = {True: run.reporter, False: NullReporter()}
    batches = (batch for _ in itertools.count() for batch in loader)

    def steps(count: int) -> Block:
        began = clocks(launcher)
        for _ in range(count):
            images, labels = next(batches)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.log(loss=loss)
        return tuple((end - begin) / count for begin, end in zip(began, clocks(launcher), strict=True))

    # All workers count the same steps, so that they change together.
    step_s = max(worker.all_gather_object(steps(WARMUP_STEPS)[0]))
    num_settling, num_measured = (max(1, round(seconds / step_s)) for seconds in (SETTLING_S, block_s))
    pairs: list[dict[str, Block]] = []
    for number in range(num_pairs):
        pair: dict[str, Block] = {}
        for keeps in (True, False) if number % 2 == 0 else (False, True):
            run.reporter = reporters[keeps]
            steps(num_settling)
            pair["kept" if keeps else "dropped"] = steps(num_measured)
        pairs.append(pair)
    run.reporter = reporters[True]
    if worker.rank == 0:
        Path(out).write_text(json.dumps(pairs), encoding="utf-8")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of values that are drawn with replacement."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_NUM_RESAMPLES))
    return medians[round(0.025 * _NUM_RESAMPLES)], medians[round(0.975 * _NUM_RESAMPLES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="all-reduce", help="one that keeps workers at the same step")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--block-seconds", type=float, default=1.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "pairs.json"
        paceline.run(
            partial(train, args.pairs, args.block_seconds, os.getpid(), str(out)),
            strategy=args.strategy,
            workers=args.workers,
            device="cpu",
            watcher=Quiet(),
            out=Path(directory) / "run",
        )
        pairs = json.loads(out.read_text(encoding="utf-8"))
    title = f"conv net, batch {BATCH_SIZE} a worker, {args.workers} x {args.strategy}, {len(pairs)} pairs"
    table = Table(title=title, title_justify="left")
    for heading in ("", "with records", "without", "difference", "of a step", "95 % interval"):
        table.add_column(heading, justify="right" if heading else "left")
    step_s = statistics.median(pair["dropped"][0] for pair in pairs)
    for index, clock in enumerate(CLOCKS):
        kept, dropped = ([pair[mode][index] for pair in pairs] for mode in ("kept", "dropped"))
        differences = [k - d for k, d in zip(kept, dropped, strict=True)]
        shown_us = [f"{statistics.median(times_s) * 1e6:.1f} us" for times_s in (kept, dropped, differences)]
        cost, low, high = (time_s / step_s for time_s in (statistics.median(differences), *interval(differences)))
        table.add_row(clock, *shown_us, f"{cost:+.2%}", f"{low:+.2%} to {high:+.2%}")
    tell([table], {"arguments": vars(args), "step_s": pairs})


if __name__ == "__main__":
    main()
