"""A script that trains for a while, and on one rank at one step does what it is told to."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="none")
parser.add_argument("--rank", type=int, default=1, help="the rank, or the server, that the fault concerns")
parser.add_argument("--step", type=int, default=5)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--step-s", type=float, default=0.0, help="how long a step takes at least")
parser.add_argument("--hold", type=int, action="append", default=[], help="a step before which all wait for word")
parser.add_argument("--loaders", type=int, default=0, help="processes that load data")
parser.add_argument("--child", action="store_true", help="start a process that outlives the script")
parser.add_argument("--results", type=Path, help="the run's result directory")
args = parser.parse_args()


class Data(TensorDataset):
    def __getitem__(self, index):
        if args.fault == "raise-in-loader" and index == 40:
            raise LookupError("the loader broke on purpose")
        return super().__getitem__(index)


def fault():
    if args.fault == "kill":
        strike(os.getpid())
    elif args.fault == "kill-server":
        strike(pids()[f"server-{args.rank}"])
    elif args.fault == "raise":
        raise ValueError("broken on purpose")
    elif args.fault == "exit":
        sys.exit(3)
    elif args.fault == "vanish":
        os._exit(0)
    elif args.fault == "hang":
        if args.results is not None:
            (args.results / "struck").touch()
        time.sleep(3600)


def strike(pid):
    while not is_recorded(worker.rank, args.step - 1):
        time.sleep(0.05)
    time.sleep(1.0)  # word of a step follows its record
    (args.results / "struck").write_text(str(time.time()))
    os.kill(pid, signal.SIGKILL)


def is_recorded(rank, step):
    """Whether the launcher has written the step down."""
    path = args.results / "steps.csv"
    rows = path.read_text().splitlines(keepends=True) if path.exists() else []
    return any(row.startswith(f"{rank},{step},") for row in rows)


def pids():
    first = (args.results / "events.jsonl").read_text().splitlines()[0]
    return json.loads(first)["details"]["pids"]


worker = paceline.init()
if args.child:
    subprocess.Popen(["sleep", "600"])
generator = torch.Generator().manual_seed(0)
inputs, labels = torch.randn(1600, 8, generator=generator), torch.randint(0, 3, (1600,), generator=generator)
is_odd = args.fault == "other-shape" and worker.rank == args.rank
model = nn.Sequential(nn.Linear(8, 16 if not is_odd else 17), nn.Tanh(), nn.Linear(16 if not is_odd else 17, 3))
if args.fault == "other-number" and worker.rank == args.rank:
    model = nn.Sequential(*model, nn.Linear(3, 3))
if args.fault == "other-dtype" and worker.rank == args.rank:
    model[2] = model[2].double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
loader = DataLoader(Data(inputs, labels), batch_size=4, shuffle=True, num_workers=args.loaders)
model, optimizer, loader = worker.prepare(model, optimizer, loader)


@worker.evaluation
def evaluation(model):
    if args.fault == "raise-in-evaluation":
        raise ArithmeticError("the evaluation broke on purpose")
    outputs = model(inputs)
    return {"loss": F.cross_entropy(outputs, labels).item(), "finite": float(outputs.isfinite().all())}


def batches():
    """Endless, up to the wanted step; the prepared loader is empty once the run has ended."""
    step = 0
    while step < args.steps:
        before = step
        for batch in loader:
            step += 1
            yield step, *batch
            if step == args.steps:
                return
        if step == before:
            return


for step, x, y in batches():
    time.sleep(args.step_s)
    while any(step >= each and not (args.results / f"go-{each}").exists() for each in args.hold):
        time.sleep(0.01)
    if args.fault == "slow" and worker.rank == args.rank:
        time.sleep(1.0)
    is_now = step == args.step and worker.rank == (0 if args.fault == "kill-server" else args.rank)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    if is_now:
        fault()
    hook = None
    if is_now and args.fault in ("nan", "inf"):
        hook = model[0].weight.register_hook(lambda gradient: gradient * float(args.fault))
    loss.backward()
    if hook is not None:
        hook.remove()
    optimizer.step()
print("the script came to its end")
