"""How long it takes from a worker's SIGKILL to the next committed step, and how long the others pause when one joins.

In each run all workers but one die, one after another, in the middle of a step. With --joins one worker joins those
that train instead, and the pause is the longest time between two steps of the first one while that happens, less the
median.

    python benchmarks/recovery.py --workers 4 --runs 3
    python benchmarks/recovery.py --workers 2 --runs 3 --joins [--model resnet18 --batch-size 4] [--strategy ps-asp]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

from peers.workload import make_model, make_optimizer, train_step
from report import tell
from rich.table import Table
from throughput import FixedBatches, whole
from torch.utils.data import DataLoader

import paceline
from paceline.engines import requests
from paceline.running.launch import Quiet

STEPS_APART = 40
NEAR_S = 1.5


def train(batch_size: int, directory: str, name: str = "convnet", *, dies: bool = True) -> None:
    """What each worker runs; it writes down when its steps were committed."""
    worker = paceline.init()
    model = make_model(name)
    optimizer = make_optimizer(model)
    loader: Any = DataLoader(FixedBatches(batch_size, seed=worker.rank), batch_size=batch_size, collate_fn=whole)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    first = next(model.parameters())
    with open(f"{directory}/steps-{worker.rank}", "w", buffering=1) as file:
        for step, batch in enumerate(loader, start=1):
            if dies and worker.rank and step == STEPS_APART * worker.rank:
                first.register_hook(partial(_die, f"{directory}/struck-{worker.rank}"))
            train_step(model, optimizer, batch)
            print(time.time(), file=file)


def _die(path: str, _: object) -> None:
    Path(path).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def recoveries_s(*, workers: int, batch_size: int) -> list[float]:
    """One for each death of a run."""
    with tempfile.TemporaryDirectory() as directory:
        paceline.run(
            partial(train, batch_size, directory),
            workers=workers,
            elastic=f"1:{workers}",
            global_batch="grow",
            max_steps=STEPS_APART * (workers + 1),
            out=f"{directory}/out",
            watcher=Quiet(),
        )
        committed_s = sorted(float(line) for line in Path(f"{directory}/steps-0").read_text().split())
        struck_s = [float(path.read_text()) for path in sorted(Path(directory).glob("struck-*"))]
    return [next(end_s for end_s in committed_s if end_s > when_s) - when_s for when_s in struck_s]


def pause_at_join_s(*, workers: int, batch_size: int, model: str, strategy: str) -> tuple[float, float]:
    """How long the others paused, and what a step took in the median of those before."""
    with tempfile.TemporaryDirectory() as directory:
        asking = Thread(target=_have_one_join, args=(Path(directory, "out"), workers + 1))
        asking.start()
        with contextlib.suppress(KeyboardInterrupt):  # which is how a run is told to stop
            paceline.run(
                partial(train, batch_size, directory, model, dies=False),
                workers=workers,
                strategy=strategy,
                elastic=f"1:{workers + 1}",
                out=f"{directory}/out",
                watcher=Quiet(),
            )
        asking.join()
        committed_s = [float(line) for line in Path(directory, "steps-0").read_text().split()]
        entered_s = float(Path(directory, f"steps-{workers}").read_text().split()[0])
    gaps_s = [(after_s, after_s - before_s) for before_s, after_s in pairwise(committed_s)]
    before_s = statistics.median(gap_s for when_s, gap_s in gaps_s if when_s < entered_s - NEAR_S)
    return max(gap_s for when_s, gap_s in gaps_s if abs(when_s - entered_s) < NEAR_S) - before_s, before_s


def _have_one_join(out: Path, workers: int) -> None:
    """And end the run when it has trained with the others for a while."""
    events = out / "events.jsonl"

    def wait_for(*words: str) -> None:
        while not (events.exists() and any(word in events.read_text() for word in words)):
            time.sleep(0.05)

    wait_for('"training"')
    time.sleep(2 * NEAR_S)
    requests.ask(out, {"do": "scale", "workers": workers})
    wait_for('"reformed"', '"let_in"')
    time.sleep(2 * NEAR_S)
    requests.ask(out, {"do": "stop"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--joins", action="store_true", help="measure joins, one a run, instead of deaths")
    parser.add_argument("--model", default="convnet", help="of the runs with joins")
    parser.add_argument("--strategy", default="all-reduce", help="of the runs with joins")
    args = parser.parse_args()
    if args.joins:
        given = {name: getattr(args, name) for name in ("workers", "batch_size", "model", "strategy")}
        pauses = [pause_at_join_s(**given) for _ in range(args.runs)]
        found = [pause_s for pause_s, _ in pauses]
        title = f"Pause at a join, {args.model}, {args.strategy}"
        table = Table("joins", "median s", "least", "most", "a step s", title=title)
        step_s = statistics.median(step_s for _, step_s in pauses)
        row = (statistics.median(found), min(found), max(found))
        table.add_row(str(len(found)), *(f"{each:.3f}" for each in row), f"{step_s:.3f}")
        load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
        tell([table], {"workload": vars(args), "pause_s": found, "step_s": step_s, "load": load})
        print(f"load average {load}")
        return
    found = [each for _ in range(args.runs) for each in recoveries_s(workers=args.workers, batch_size=args.batch_size)]
    table = Table("deaths", "median s", "least", "most", title=f"SIGKILL to the next step, {args.workers} workers")
    table.add_row(str(len(found)), f"{statistics.median(found):.2f}", f"{min(found):.2f}", f"{max(found):.2f}")
    tell([table], {"workload": vars(args), "recovery_s": found})


if __name__ == "__main__":
    main()
