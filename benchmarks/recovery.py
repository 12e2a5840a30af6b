"""How long it takes from a worker's SIGKILL to the next committed step, beside other systems that go on, and how long
the others pause when one joins.

In each run all workers but one die, one after another, in the middle of a step. `--only` says whose runs: `elastic` are
Paceline's; `torchrun` and `ray-train` end all workers and start as many again, from a checkpoint of every tenth step;
`torchft` goes on with those who are left, as Paceline does (`--torchft`: a Python that has it, as
`python tests/apart.py torchft` makes one). In `all-reduce`, Paceline without `--elastic`, nobody dies: it is there for
what a step takes. All run one after another in every round, so that a change of the machine's mood meets all of them.

With --joins one worker joins those that train instead, and the pause is the longest time between two steps of the first
one while that happens, less the median. It has two parts, with that median: until the joiner has its first batch, with
the state that it has taken, and the joiner's first step, for which all wait.

    python benchmarks/recovery.py --workers 4 --runs 3 --only elastic
    python benchmarks/recovery.py --workers 3 --runs 5 --torchft .venv/apart/torchft/bin/python
    python benchmarks/recovery.py --workers 2 --runs 3 --joins [--model resnet18 --batch-size 4] [--strategy ps-asp]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from peers.deaths import Committed, Diary, Recovery, committed, last_step, recoveries, step_s
from peers.workload import make_model, make_optimizer, train_step
from report import load_average, tell
from rich.table import Table
from throughput import FixedBatches, whole
from torch.utils.data import DataLoader

import paceline
from paceline.engines import requests
from paceline.running.launch import Quiet

NEAR_S = 1.5
ROOT = Path(__file__).resolve().parents[1]
OWN = ("elastic", "all-reduce")
PEERS = ("torchrun", "ray-train", "torchft")
# torchrun: by default workers that are started again find the addresses of those before them in a store, and fail.
PEERS_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Found(NamedTuple):
    deaths: list[Recovery]
    step_s: float


def train(batch_size: int, directory: str, name: str = "convnet", *, dies: bool = True) -> None:
    """What each worker runs; it writes down when its steps were committed."""
    worker = paceline.init()
    model = make_model(name)
    optimizer = make_optimizer(model)
    loader: Any = DataLoader(FixedBatches(batch_size, seed=worker.rank), batch_size=batch_size, collate_fn=whole)
    diary = Diary(directory, worker.rank, model, dies=dies)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader, start=1):
        diary.begin(step)
        train_step(model, optimizer, batch)
        diary.end(step)


def own_run(contender: str, directory: str, args: argparse.Namespace) -> None:
    is_elastic = contender == "elastic"
    paceline.run(
        partial(train, args.batch_size, directory, args.model, dies=is_elastic),
        workers=args.workers,
        elastic=f"1:{args.workers}" if is_elastic else None,
        global_batch="grow" if is_elastic else None,
        max_steps=last_step(args.workers) if is_elastic else last_step(1),
        out=f"{directory}/out",
        watcher=Quiet(),
    )


def peer_run(contender: str, directory: str, args: argparse.Namespace) -> None:
    """Raises CalledProcessError where it fails."""
    ours = ["--model", args.model, "--batch-size", str(args.batch_size), "--directory", directory]
    number = ["--workers", str(args.workers)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.workers)]
    command = {
        "torchrun": [
            sys.executable,
            *launcher,
            *("--max-restarts", str(args.workers - 1), "-m", "benchmarks.peers.elastic_torchrun", *ours),
        ],
        "ray-train": [sys.executable, "-m", "benchmarks.peers.elastic_ray_train", *ours, *number],
        "torchft": [args.torchft, "-m", "benchmarks.peers.elastic_torchft", *ours, *number],
    }[contender]
    environment = {**os.environ, **PEERS_ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with open(f"{directory}/output", "w") as output:
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)


def measured(contender: str, args: argparse.Namespace) -> Found:
    """One run's."""
    with tempfile.TemporaryDirectory() as directory:
        (own_run if contender in OWN else peer_run)(contender, directory, args)
        found = Found(recoveries(Path(directory)), step_s(Path(directory)))
        assert len(found.deaths) == (0 if contender == "all-reduce" else args.workers - 1)
        return found


def table_of(found: dict[str, list[Found]], *, title: str) -> Table:
    columns = ("deaths", "to the next step, s", "95 %", "most", "to a new step, s", "steps lost", "a step, ms")
    table = Table("", *columns, title=title)
    for contender, runs in found.items():
        deaths = [death for run in runs for death in run.deaths]
        took_ms = f"{1000 * statistics.median(run.step_s for run in runs):.1f}"
        if not deaths:
            table.add_row(contender, "0", *("-" * 5), took_ms)
            continue
        next_s = [death.next_s for death in deaths]
        caught_up_s = statistics.median(death.caught_up_s for death in deaths)
        times = (statistics.median(next_s), _percentile_95(next_s), max(next_s), caught_up_s)
        lost = f"{statistics.median(death.lost_steps for death in deaths):.0f}"
        table.add_row(contender, str(len(deaths)), *(f"{each:.2f}" for each in times), lost, took_ms)
    return table


def _percentile_95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


class Pause(NamedTuple):
    """How long the first worker paused for a joiner, and what that was made of, in seconds."""

    longer_s: float
    """Than its median step before."""
    step_s: float
    """That."""
    until_entered_s: float
    """From the end of its last step without the joiner to the joiner's first batch."""
    first_step_s: float
    """The joiner's."""
    later_step_s: float
    """The joiner's, in the median."""


def pause_at_join(*, workers: int, batch_size: int, model: str, strategy: str) -> Pause:
    """In one run, in which one joins."""
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
        return _pause(committed(Path(directory)), committed(Path(directory), rank=workers))


def _pause(first: Sequence[Committed], joiner: Sequence[Committed]) -> Pause:
    entered = joiner[0]
    steps = [(after.when_s, after.when_s - before.when_s) for before, after in pairwise(first)]
    step_s = statistics.median(took_s for when_s, took_s in steps if when_s < entered.when_s - NEAR_S)
    longest_s = max(took_s for when_s, took_s in steps if abs(when_s - entered.when_s) < NEAR_S)
    last_s = max(each.when_s for each in first if each.when_s < entered.begun_s)
    later_s = statistics.median(each.when_s - each.begun_s for each in joiner[1:])
    return Pause(longest_s - step_s, step_s, entered.begun_s - last_s, entered.when_s - entered.begun_s, later_s)


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


def tell_joins(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in ("workers", "batch_size", "model", "strategy")}
    pauses = [pause_at_join(**given) for _ in range(args.runs)]
    titles = ("longer, s", "a step before", "until the joiner's first batch", "its first step", "its later steps")
    table = Table("", *titles, title=f"Pause at {args.runs} joins, {args.model}, {args.strategy}")
    for name, among in (("median", statistics.median), ("least", min), ("most", max)):
        table.add_row(name, *(f"{among(column):.3f}" for column in zip(*pauses, strict=True)))
    found = [pause._asdict() for pause in pauses]
    tell([table], {"workload": vars(args), "pauses": found, "load": load_average()})


def tell_deaths(args: argparse.Namespace) -> None:
    names = [name for name in (*OWN, *PEERS) if name in args.only and (name != "torchft" or args.torchft)]
    found: dict[str, list[Found]] = {name: [] for name in names}
    for _ in range(args.runs):
        for name in names:
            found[name].append(measured(name, args))
            print(f"{name}: {found[name][-1]}, load average {load_average()}", file=sys.stderr, flush=True)
    table = table_of(found, title=f"SIGKILL to the next step, {args.workers} workers, {args.model}")
    tell([table], {"workload": vars(args), "recovery_s": found, "load": load_average()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=(*OWN, *PEERS), default=(*OWN, *PEERS))
    parser.add_argument("--torchft", metavar="PYTHON", help="has torchft; without it there are no runs of torchft")
    parser.add_argument("--joins", action="store_true", help="measure joins, one a run, instead of deaths")
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--strategy", default="all-reduce", help="of the runs with joins")
    args = parser.parse_args()
    if args.joins:
        tell_joins(args)
    else:
        tell_deaths(args)


if __name__ == "__main__":
    main()
