"""Gradients that do not depend on the parameters: in whatever order they count, each once makes one model."""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

worker = paceline.init()
generator = torch.Generator().manual_seed(0)
rows = TensorDataset(torch.randn(240, 64, generator=generator, dtype=torch.float64))
model = torch.nn.Linear(64, 1, bias=False).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = worker.prepare(model, optimizer, DataLoader(rows, batch_size=4, shuffle=True))
for (x,) in loader:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
    time.sleep(0.005)
