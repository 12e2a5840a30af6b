"""Trains on the whole data at every step, so that any number of workers must come to the same parameters."""

import os
import sys
from functools import partial

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, TensorDataset

import paceline

NUM_SAMPLES = 32
OPTIMIZERS = {
    "momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(Adam, lr=0.01, weight_decay=0.01),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
}


def data():
    generator = torch.Generator().manual_seed(7)
    return torch.randn(NUM_SAMPLES, 1, 8, 8, generator=generator), torch.randn(NUM_SAMPLES, 2, generator=generator)


def build(optimizer):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 2))
    return model, OPTIMIZERS[optimizer](model.parameters())


def update(model, optimizer, x, y):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    worker = paceline.init()
    print(f"rank {worker.rank} local {worker.local_rank} node {os.environ['RAY_RAYLET_PID']}")
    model, optimizer = build(sys.argv[1])
    loader = DataLoader(TensorDataset(*data()), batch_size=NUM_SAMPLES // worker.size)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for _ in range(100):
        for x, y in loader:
            update(model, optimizer, x, y)
