"""What a client's turn takes besides its training: fed-avg beside a bare loop, in turns.

    python benchmarks/client_overhead.py
    python benchmarks/client_overhead.py --engine none --steps 60 --turns 1 --repeats 60

The 2NN of the FedAvg paper (McMahan et al., 2017), batches of ten, a tenth of the clients a round. The virtual engine
simulates time; with none there is a worker's session alone, as it is in each process of a run, with the real clock.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hot_path_checks import unhooked
from hot_path_contenders import Kept
from report import tell
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.comm.alone import AloneCollective
from paceline.config import RunConfig
from paceline.membership import Membership
from paceline.strategies import build
from paceline.strategies.base import Context
from paceline.training.given import told_apart
from paceline.training.session import Session

BATCH_SIZE, A_ROUND = 10, 10
Measured = Callable[[int], float]
"""Given a number of turns, the seconds of one."""


def data_of(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 784, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 10, (num_samples,), generator=generator))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def script_of(num_samples: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = network()
    loader: DataLoader[Any] = DataLoader(data_of(num_samples), BATCH_SIZE, shuffle=True)
    return model, SGD(model.parameters(), lr=0.01), loader


def timed(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, num_turns: int) -> float:
    began_s = time.perf_counter()
    for _ in range(num_turns):
        for x, y in loader:
            step(model, optimizer, x, y)
    return (time.perf_counter() - began_s) / num_turns


def bare(steps: int) -> Measured:
    """A loop that does nothing but train."""
    script = script_of(steps * BATCH_SIZE)

    def measured(num_turns: int) -> float:
        with unhooked():
            return timed(*script, num_turns)

    return measured


def without_engine(steps: int) -> Measured:
    """A session's turns; each tenth of them ends a round."""
    device = torch.device("cpu")
    context = Context(0, Membership.first(1), 0, 1, device, AloneCollective())
    strategy = build("fed-avg", {"clients": A_ROUND, "fraction": 1.0})
    session = Session(context, strategy, RunConfig(seed=0), Kept())
    given = script_of(A_ROUND * steps * BATCH_SIZE)
    [loader] = session.prepare(told_apart(given, {})).values()
    return partial(timed, *given[:2], loader)


def federated_s(steps: int, num_turns: int) -> float:
    """A turn's seconds on the virtual engine, from the first one's first batch to that of the turn behind the last one
    that counts."""
    num_clients = 10 * A_ROUND
    begun_s: list[float] = []

    def script() -> None:
        worker = paceline.init()
        model, optimizer, loader = worker.prepare(*script_of(num_clients * steps * BATCH_SIZE))
        for _ in range(num_turns + A_ROUND):
            for number, (x, y) in enumerate(loader):
                if not number:
                    begun_s.append(time.perf_counter())
                step(model, optimizer, x, y)

    with tempfile.TemporaryDirectory() as out:
        paceline.run(
            script,
            strategy="fed-avg",
            options={"clients": num_clients, "fraction": A_ROUND / num_clients},
            workers=1,
            engine="virtual",
            cluster="lab-1gbe",
            max_steps=num_turns // A_ROUND + 1,  # the run's end is in none of those that count
            out=Path(out) / "run",
        )
    assert len(begun_s) == num_turns + A_ROUND, f"{len(begun_s)} turns were played"
    return (begun_s[num_turns] - begun_s[0]) / num_turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("virtual", "none"), default="virtual")
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--turns", type=int, default=200, help="in each measurement; there, a multiple of ten")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    is_virtual = args.engine == "virtual"
    if args.turns < 1 or (is_virtual and args.turns % A_ROUND):
        parser.error(f"--turns must be a multiple of {A_ROUND}, the clients of a round, not {args.turns}")
    torch.set_num_threads(1)
    contenders = bare(args.steps), partial(federated_s, args.steps) if is_virtual else without_engine(args.steps)
    for measured in contenders:
        measured(args.turns)  # the first ones of a process are slower
    pairs = []
    for number in range(args.repeats):
        order = contenders if number % 2 else contenders[::-1]
        took_s = {measured: measured(args.turns) for measured in order}
        pairs.append([took_s[measured] * 1e3 for measured in contenders])
    table = Table("a client's turn", "ms, median", "quartiles", title=f"{args.steps} steps, engine {args.engine}")
    more_ms = [federated - plain for plain, federated in pairs]
    for name, times_ms in (
        ("bare", [plain for plain, _ in pairs]),
        ("fed-avg", [own for _, own in pairs]),
        ("more", more_ms),
    ):
        lower, middle, upper = statistics.quantiles(times_ms, n=4)
        table.add_row(name, f"{middle:.2f}", f"{lower:.2f} to {upper:.2f}")
    tell(
        [table],
        {"turns": args.turns, "steps": args.steps, "engine": args.engine, "more_ms": statistics.median(more_ms)},
    )


if __name__ == "__main__":
    main()
