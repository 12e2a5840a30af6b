"""A factorisation of ratings whose rows lie in tables on servers: the script, and the rows that a run has saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.nn import ShardedEmbedding, read_ahead
from paceline.training.row_tables import ROWS_FILE
from paceline.training.snapshot import read_model_file
from paceline.training.worker import Worker
from tests.conformance import local_engine, virtual_engine
from tests.conformance.rows import keep

NUM_USERS, NUM_ITEMS, DIM, BATCH = 2**40, 30, 4, 6
SLOW = pytest.mark.slow
ENGINES = [
    pytest.param(local_engine.run, id="processes", marks=SLOW),
    pytest.param(virtual_engine.run, id="virtual"),
]
USERS = torch.tensor([3, 2**40 - 1, 2**33 + 5, 10, 11, 12, 77, 2**20])
"""Those who come up, of all that there might be."""
NUM_STEPS = 20
HYBRID = "all-reduce:rows=asp"


def ratings() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    users = torch.randint(0, len(USERS), (NUM_STEPS * 2 * BATCH + 5,), generator=generator)
    items = torch.randint(0, NUM_ITEMS // 2, users.shape, generator=generator)
    return TensorDataset(users, items, torch.randn(users.shape, generator=generator, dtype=torch.float64))


class Factors(nn.Module):
    """Matrix factorisation, with a bias that is a parameter. `users` and `items` are tables, or plain embeddings."""

    def __init__(self, users: nn.Module, items: nn.Module) -> None:
        super().__init__()
        self.users, self.items = users, items
        self.bias = nn.Parameter(torch.zeros(24, dtype=torch.float64))  # some for each of three servers

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        product: Tensor = (self.users(users) * self.items(items)).sum(dim=-1)
        return product + self.bias.mean()


def tables(optimizer: str, **limits: int) -> Factors:
    """The limits are those of users."""
    torch.manual_seed(5)
    users = ShardedEmbedding(NUM_USERS, DIM, optimizer=optimizer, name="users", dtype=torch.float64, **limits)
    items = ShardedEmbedding(NUM_ITEMS, DIM, optimizer=optimizer, name="items", std=0.5, dtype=torch.float64)
    return Factors(users, items)


UNTOUCHED = 999


def evaluate(model: Any) -> dict[str, float]:
    users, items, wanted = ratings().tensors
    assert model.users(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, DIM)
    error = (model(USERS[users], items) - wanted).square().mean()
    return {"error": float(error), "untouched": float(model.users(torch.tensor([UNTOUCHED])).sum())}


def loss_of(model: Any, batch: Any) -> Tensor:
    users, items, wanted = batch
    loss: Tensor = (model(USERS[users], items) - wanted).square().mean()
    return loss


def step(model: Any, updater: Any, batch: Any) -> None:
    updater.zero_grad()
    loss_of(model, batch).backward()
    updater.step()


def train(
    worker: Worker,
    out: Path,
    *,
    optimizer: str = "adagrad:lr=0.3",
    fails_at: int | None = None,
    reads_ahead: bool = False,
    **limits: int,
) -> None:
    model: Any = tables(optimizer, **limits)
    loader: Any = DataLoader(ratings(), batch_size=BATCH, shuffle=True)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    worker.evaluation(evaluate)
    for number, batch in enumerate(ahead(model, loader) if reads_ahead else loader):
        step(model, updater, batch)
        if number == fails_at:
            raise RuntimeError("scripted failure")
    keep(out, f"bias-{worker.rank}", model.bias.detach())


def ahead(model: Any, loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches, whose rows come while the one before is trained on."""
    return read_ahead(loader, lambda batch: [(model.users, USERS[batch[0]]), (model.items, batch[1])])


def rows_of(out: Path) -> dict[str, Tensor]:
    return read_model_file(out / "run" / ROWS_FILE)
