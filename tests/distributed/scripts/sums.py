"""Gradients that do not depend on the parameters: in whatever order they count, each once makes one model."""

import argparse
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--step-s", type=float, default=0.005)
parser.add_argument("--until-workers", type=int, default=0, help="steps are slow while there are fewer than this")
parser.add_argument("--until-lost", nargs=2, metavar=("DIR", "WHO"), help="and while this server has not died there")
args = parser.parse_args()
worker = paceline.init()
generator = torch.Generator().manual_seed(0)
rows = TensorDataset(torch.randn(240, 64, generator=generator, dtype=torch.float64))
model = torch.nn.Linear(64, 1, bias=False).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = worker.prepare(model, optimizer, DataLoader(rows, batch_size=4, shuffle=True))


def is_slow():
    if worker.size < args.until_workers:
        return True
    if args.until_lost is None or not Path(args.until_lost[0]).exists():
        return False
    path, who = Path(args.until_lost[0], "events.jsonl"), args.until_lost[1]
    told = path.read_text().splitlines() if path.exists() else []  # the last may be under way
    return not any('"server_lost"' in line and f'"{who}"' in line for line in told)


for _ in range(args.epochs):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        time.sleep(0.5 if is_slow() else args.step_s)
