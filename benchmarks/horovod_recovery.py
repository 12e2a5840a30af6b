"""How long it takes from a worker's SIGKILL to the next step, in an elastic job of `paceline horovodrun`.

In each run three hosts' names, all of them this machine, have a worker each; two die, one after another, in the middle
of a step. The conv net commits every fifth step.

    python benchmarks/horovod_recovery.py --runs 3
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from peers.workload import make_model, make_optimizer, train_step
from report import tell
from rich.table import Table

STEPS_APART, COMMIT_EVERY = 40, 5
HOSTS = f"localhost:1,127.0.0.1:1,{socket.gethostname()}:1"


def train(directory: str) -> None:
    """What each worker runs; it writes down when its steps were done."""
    import paceline.horovod.torch as hvd

    hvd.init()
    number = hvd.rank()
    model = make_model("convnet")
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=model.named_parameters())
    batch = (torch.randn(100, 3, 32, 32), torch.randint(0, 10, (100,)))
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    first = next(model.parameters())

    @hvd.elastic.run
    def steps(state: hvd.elastic.TorchState) -> None:
        while state.step < 3 * STEPS_APART:
            if number and state.step == STEPS_APART * number + 2:
                first.register_hook(partial(_die, f"{directory}/struck-{number}"))
            train_step(model, optimizer, batch)
            state.step += 1
            with open(f"{directory}/steps-{number}", "a") as file:
                print(time.time(), file=file)
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    steps(state)


def _die(path: str, _: object) -> None:
    Path(path).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def recoveries_s() -> list[float]:
    """One for each death of a run."""
    command = [str(Path(sys.executable).with_name("paceline")), "horovodrun", "-np", "3", "--min-num-proc", "1"]
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [*command, "-H", HOSTS, "python", str(Path(__file__).resolve()), "--train", directory],
            check=True,
            cwd=directory,
        )
        done_s = sorted(float(line) for line in Path(f"{directory}/steps-0").read_text().split())
        struck_s = [float(path.read_text()) for path in sorted(Path(directory).glob("struck-*"))]
    assert len(struck_s) == 2
    return [next(end_s for end_s in done_s if end_s > when_s) - when_s for when_s in struck_s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--train", metavar="DIRECTORY", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train)
        return
    found = [each for _ in range(args.runs) for each in recoveries_s()]
    table = Table("deaths", "median s", "least", "most", title="SIGKILL to the next step of an elastic job")
    table.add_row(str(len(found)), f"{statistics.median(found):.2f}", f"{min(found):.2f}", f"{max(found):.2f}")
    tell([table], {"runs": args.runs, "recovery_s": found})


if __name__ == "__main__":
    main()
