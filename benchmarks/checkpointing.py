"""What a checkpoint costs training: the pause, and what the steps beside its writing take longer.

Runs whose checkpoints are written beside training, and within the pause, take turns. The pause is the time from the
end of a step to the next batch where a checkpoint is taken; what it costs in all is the time of the steps from one
checkpoint to the next, less as many median ones.

    python benchmarks/checkpointing.py --model convnet --batch-size 100 --every 40
    python benchmarks/checkpointing.py --model resnet18 --batch-size 4 --every 8
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from peers.workload import make_model, make_optimizer, train_step
from report import tell
from rich.table import Table
from throughput import FixedBatches, whole
from torch.utils.data import DataLoader

import paceline
from paceline.engines.ray.control import ControlLine
from paceline.running.launch import Quiet

NUM_FIRST = 2
"""Checkpoints that are left out: memory is new, and the first is looked through for what cannot be kept."""


def train(batch_size: int, path: str, name: str, *, beside: bool) -> None:
    """What each worker runs; the first writes down when its steps began and ended."""
    ControlLine.writes_beside = beside
    worker = paceline.init()
    model = make_model(name)
    optimizer = make_optimizer(model)
    loader: Any = DataLoader(FixedBatches(batch_size, seed=worker.rank), batch_size=batch_size, collate_fn=whole)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    times_s: list[float] = []
    try:
        for batch in loader:
            times_s.append(time.perf_counter())
            train_step(model, optimizer, batch)
            times_s.append(time.perf_counter())
    finally:
        if worker.rank == 0:
            Path(path).write_text("\n".join(map(str, times_s)))


def measured(*, model: str, batch_size: int, workers: int, every: int, count: int, beside: bool) -> dict[str, float]:
    """Medians over the checkpoints of a run, in milliseconds."""
    with tempfile.TemporaryDirectory() as directory:
        result = paceline.run(
            partial(train, batch_size, f"{directory}/times", model, beside=beside),
            workers=workers,
            checkpoint_every=every,
            max_steps=every * (count + NUM_FIRST) + every - 1,
            out=f"{directory}/out",
            watcher=Quiet(),
        )
        saved = [event.iteration for event in result.events if event.name == "checkpoint"][:-1]
        times_s = [float(line) for line in Path(directory, "times").read_text().split()]
    begun_s, ended_s = times_s[::2], times_s[1::2]
    whole_s = [after_s - before_s for before_s, after_s in pairwise(begun_s)]
    ordinary_s = statistics.median(whole_s)
    taken = saved[NUM_FIRST:]
    pauses_s = [begun_s[step] - ended_s[step - 1] for step in taken]
    costs_s = [sum(whole_s[step - 1 : step - 1 + every - 1]) - (every - 1) * ordinary_s for step in taken]
    return {
        "step": 1e3 * ordinary_s,
        "pause": 1e3 * statistics.median(pauses_s),
        "longest pause": 1e3 * max(pauses_s),
        "cost in all": 1e3 * statistics.median(costs_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=int, default=40, help="steps from one checkpoint to the next")
    parser.add_argument("--count", type=int, default=6, help="checkpoints a run that count")
    parser.add_argument("--rounds", type=int, default=2)
    given = vars(parser.parse_args())
    facts = dict(given)
    rounds = given.pop("rounds")
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(rounds):
        for beside, runs in found.items():
            runs.append(measured(**given, beside=beside))
    table = Table("ms")
    for name in found[True][0]:
        table.add_column(name, justify="right")
    for beside, runs in found.items():
        cells = [f"{statistics.median(run[name] for run in runs):.1f}" for name in runs[0]]
        table.add_row("beside training" if beside else "within the pause", *cells)
    tell([table], facts)


if __name__ == "__main__":
    main()
