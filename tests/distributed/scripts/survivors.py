"""A script whose workers die, or stop, where they are told to; it writes down which samples each step was made of."""

import argparse
import importlib
import itertools
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.nn import ShardedEmbedding

parser = argparse.ArgumentParser()
parser.add_argument("--fail", action="append", default=[], metavar="RANK:STEP:HOW", help="may be repeated")
parser.add_argument("--fail-at", action="append", default=[], metavar="RANK:NUMBER:MODULE:METHOD", help="before a call")
parser.add_argument("--fail-in-evaluation", type=int, help="the rank that dies in its second evaluation")
WAYS = "raise, import, taking, stopped, or another model"
parser.add_argument("--fail-to-join", action="append", default=[], metavar="RANK:WHEN", help=WAYS)
parser.add_argument("--hold", type=int, action="append", default=[], help="an iteration after which all wait for word")
parser.add_argument("--fail-giving", type=int, help="the rank that dies while it gives its state")
parser.add_argument("--tally", action="store_true", help="a model that counts the samples of its updates, twice")
parser.add_argument("--owed", action="store_true", help="write down what codecs have left out, after each step")
parser.add_argument("--turned", action="store_true", help="write down of which steps another gradient was sent")
parser.add_argument("--rows", action="store_true", help="of a table, which count the samples of a tally, too")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=96)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--optimizer", default="momentum")
parser.add_argument("--decay", type=float, default=0.98, help="of the rate, a step")
parser.add_argument("--loaders", type=int, default=0)
parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument("--log", type=Path, required=True, help="a folder for what each worker has trained on")
args = parser.parse_args()
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Tally(nn.Module):
    """Two halves, one for each of two servers. Each gradient takes one from an element for each of its samples."""

    def __init__(self):
        super().__init__()
        self.halves = nn.ParameterList([torch.zeros(args.samples) for _ in range(2)])
        self.table = ShardedEmbedding(2**50, 1, optimizer="sgd:lr=0.5", std=0.0, name="samples") if args.rows else None

    def forward(self, index):
        rows = 0.0 if self.table is None else self.table(index * 2**40).sum()
        return -rows - sum(half[index].sum() for half in self.halves)


num_evaluations = 0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segfault": signal.SIGSEGV}

worker = paceline.init()
when = dict(told.split(":") for told in args.fail_to_join).get(str(worker.rank))


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGSTOP if when == "stopped" else signal.SIGKILL)
    time.sleep(60)


def die_before(method, *, number):
    calls = itertools.count(1)
    return lambda *given, **named: die() if next(calls) == number else method(*given, **named)


for told in args.fail_at:
    rank, number, module, path = told.split(":")
    if worker.rank == int(rank):
        owner, name = path.split(".")
        owner = getattr(importlib.import_module(module), owner)
        setattr(owner, name, die_before(getattr(owner, name), number=int(number)))
if when == "raise":
    raise ImportError("no module of this name here")
if when == "import":
    die()
if when in ("taking", "stopped"):
    torch.load = die
if worker.rank == args.fail_giving:
    torch.save = die
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(args.samples, 8, generator=generator)
labels = torch.randint(0, 3, (args.samples,), generator=generator)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
if when == "another model":
    model.append(nn.Linear(3, 3))
optimizer = OPTIMIZERS[args.optimizer](model.parameters())
if args.tally:
    model = Tally()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if args.rows and worker.size > 1:  # who joins has to be told
        model.table.lr = 1.0
data = TensorDataset(torch.arange(args.samples), inputs, labels)
loader = DataLoader(data, batch_size=args.batch, shuffle=True, num_workers=args.loaders)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0 if args.tally else args.decay)
model, optimizer, loader = worker.prepare(model, optimizer, loader, scheduler=scheduler)


@worker.evaluation
def evaluation(model):
    global num_evaluations
    num_evaluations += 1
    if num_evaluations == 2 and worker.rank == args.fail_in_evaluation:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"loss": loss_of(model, torch.arange(args.samples), inputs, labels).item()}


def loss_of(model, index, x, y):
    return model(index) if args.tally else F.cross_entropy(model(x), y)


def fail_at(step):
    """In the middle of backward, when the last layers' gradients are on their way."""
    for told in args.fail:
        rank, when, how = told.split(":")
        if (worker.rank, step) == (int(rank), int(when)):
            (args.log / f"struck-{rank}").write_text(str(time.time()))
            os.kill(os.getpid(), SIGNALS[how])


def write_down_what_is_owed():
    (left,) = worker._session.run.prepared.synchronizer.own_state().values()
    path = args.log / f"owed-{worker.rank}"
    path.with_suffix(".new").write_text(" ".join(map(str, left.tensor.tolist())))
    path.with_suffix(".new").replace(path)


step = 0
for epoch in range(args.epochs):
    for index, x, y in loader:
        step += 1
        iteration = worker.iteration
        time.sleep(args.step_s)
        while any(worker.iteration >= each and not (args.log / f"go-{each}").exists() for each in args.hold):
            time.sleep(0.01)
        loss = loss_of(model, index, x, y)
        optimizer.zero_grad()
        hook = next(iter(model.parameters())).register_hook(lambda gradient, step=step: fail_at(step))
        loss.backward()
        hook.remove()
        with (args.log / f"rank-{worker.rank}").open("a") as file:
            print(epoch, iteration, *index.tolist(), file=file)
        own = [parameter.grad.clone() for parameter in model.parameters() if args.turned]
        optimizer.step()
        scheduler.step()
        if any(not torch.equal(sent.grad, each) for sent, each in zip(model.parameters(), own, strict=False)):
            with (args.log / f"turned-{worker.rank}").open("a") as file:
                print(step, file=file)
        if args.owed:
            write_down_what_is_owed()
print("the script came to its end")
