"""Rows of tables on servers: what a run makes of them equals one process with `nn.Embedding(sparse=True)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.errors import RunFailed
from paceline.nn import ShardedEmbedding
from paceline.records import MetricRecord, StepRecord
from paceline.server.tables.hashing import normal
from paceline.training.row_tables import ROWS_FILE
from paceline.training.snapshot import read_model_file
from paceline.training.worker import Worker
from tests.conformance import local_engine, virtual_engine
from tests.conformance.reference import Reference
from tests.conformance.rows import keep, kept, launched

NUM_USERS, NUM_ITEMS, DIM, BATCH = 2**40, 30, 4, 6
ENGINES = [pytest.param(local_engine.run, id="processes"), pytest.param(virtual_engine.run, id="virtual")]
USERS = torch.tensor([3, 2**40 - 1, 2**33 + 5, 10, 11, 12, 77, 2**20])
"""Those who come up, of all that there might be."""
NUM_STEPS = 20


def ratings() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    users = torch.randint(0, len(USERS), (NUM_STEPS * 2 * BATCH,), generator=generator)
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


def tables(optimizer: str) -> Factors:
    torch.manual_seed(5)
    users = ShardedEmbedding(NUM_USERS, DIM, optimizer=optimizer, name="users", dtype=torch.float64)
    items = ShardedEmbedding(NUM_ITEMS, DIM, optimizer=optimizer, name="items", std=0.5, dtype=torch.float64)
    return Factors(users, items)


def train(worker: Worker, out: Path, *, optimizer: str = "adagrad:lr=0.3", fails_at: int | None = None) -> None:
    model: Any = tables(optimizer)
    loader: Any = DataLoader(ratings(), batch_size=BATCH, shuffle=True)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    @worker.evaluation
    def error(model: nn.Module) -> dict[str, float]:
        never_seen = model.users(torch.tensor([999]))  # type: ignore[operator]
        users, items, wanted = ratings().tensors
        found = (model(USERS[users], items) - wanted).square().mean()
        return {"error": float(found), "untouched": float(never_seen.sum())}

    for step, (users, items, wanted) in enumerate(loader):
        updater.zero_grad()
        (model(USERS[users], items) - wanted).square().mean().backward()
        updater.step()
        if step == fails_at:
            raise RuntimeError("scripted failure")
    keep(out, f"bias-{worker.rank}", model.bias.detach())


def train_plain(num_workers: int, optimizer: Callable[[Any], torch.optim.Optimizer]) -> Factors:
    """One process, with the batches of all workers together."""
    own = tables("sgd")
    users = nn.Embedding(len(USERS), DIM, sparse=True, dtype=torch.float64)
    items = nn.Embedding(NUM_ITEMS, DIM, sparse=True, dtype=torch.float64)
    with torch.no_grad():
        users.weight.copy_(own.users(USERS))
        items.weight.copy_(own.items(torch.arange(NUM_ITEMS)))
    model = Factors(users, items)
    dense = torch.optim.SGD([model.bias], lr=0.1)
    sparse = optimizer([users.weight, items.weight])
    together = Reference(num_workers).prepare(model, dense, DataLoader(ratings(), batch_size=BATCH, shuffle=True))
    for who, what, wanted in together[2]:
        dense.zero_grad()
        sparse.zero_grad()
        (model(who, what) - wanted).square().mean().backward()
        dense.step()
        sparse.step()
    return model


TWINS = {
    "sgd:lr=0.1": partial(torch.optim.SGD, lr=0.1),
    "adagrad:lr=0.3": partial(torch.optim.Adagrad, lr=0.3),
    "adam:lr=0.05": partial(torch.optim.SparseAdam, lr=0.05),
}


def rows_of(out: Path) -> dict[str, Tensor]:
    return read_model_file(out / "run" / ROWS_FILE)


@pytest.mark.parametrize("run", ENGINES)
@pytest.mark.parametrize("optimizer", TWINS)
@pytest.mark.parametrize(
    ("strategy", "workers", "options"), [("single", 1, {}), ("ps-bsp", 2, {"servers": 3}), ("ps-bsp", 2, {})]
)
def test_rows_equal_a_plain_embedding(
    run: Any, optimizer: str, strategy: str, workers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    script = partial(launched, partial(train, optimizer=optimizer), tmp_path)
    run(script, strategy=strategy, workers=workers, options=options, out=tmp_path / "run")
    twin = train_plain(workers, TWINS[optimizer])
    rows = rows_of(tmp_path)
    assert rows["users.keys"].tolist() == sorted(USERS.tolist())
    torch.testing.assert_close(rows["users.rows"], twin.users.weight[USERS.argsort()].detach())
    torch.testing.assert_close(rows["items.rows"], twin.items.weight[rows["items.keys"]].detach())
    torch.testing.assert_close(kept(tmp_path, "bias-0"), twin.bias.detach())
