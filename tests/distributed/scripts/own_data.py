"""A script whose data are its own machine's: what is to be learnt differs from part to part.

It is the same file for the server of a served run, for its clients, and for one process that plays all of them.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline


def data_of(part: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(part)
    x = torch.randn(20 + 10 * part, 5, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + part


parser = argparse.ArgumentParser()
parser.add_argument("--parts", default="0")
parser.add_argument("--passes", type=int, default=10_000)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--width", type=int, default=5)
parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument("--over-at", type=Path, default=Path("/no such file"), help="evaluations say whether it is there")
arguments = parser.parse_args()
worker = paceline.init()
parts = [data_of(int(part)) for part in arguments.parts.split(",")]
x, y = (torch.cat(each) for each in zip(*parts, strict=True))
x = F.pad(x, (0, arguments.width - 5))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(arguments.width, 4), nn.Tanh(), nn.Linear(4, 1)).double()
loader = DataLoader(TensorDataset(x, y), batch_size=10)
model, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=arguments.lr), loader)
worker.evaluation(lambda model: {"loss": float(F.mse_loss(model(x), y)), "over": float(arguments.over_at.exists())})
for _ in range(arguments.passes):
    for inputs, wanted in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        if arguments.step_s:
            time.sleep(arguments.step_s)
