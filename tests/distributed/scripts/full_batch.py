"""Trains on the whole data at every step, so that any number of workers must come to the same parameters."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

NUM_SAMPLES = 32


def data():
    generator = torch.Generator().manual_seed(7)
    return torch.randn(NUM_SAMPLES, 6, generator=generator), torch.randn(NUM_SAMPLES, 2, generator=generator)


def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def update(model, optimizer, x, y):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    worker = paceline.init()
    print(f"rank {worker.rank} local {worker.local_rank} node {os.getppid()}")
    model, optimizer = build()
    loader = DataLoader(TensorDataset(*data()), batch_size=NUM_SAMPLES // worker.size)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for _ in range(100):
        for x, y in loader:
            update(model, optimizer, x, y)
