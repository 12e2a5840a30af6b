"""Rows of tables on servers, misused: what is refused, and in which words."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.errors import RunFailed, UsageError
from paceline.nn import ShardedEmbedding
from paceline.strategies import build
from paceline.training.pauses import MODEL_FILE
from paceline.training.snapshot import read_model_file
from paceline.training.worker import Worker
from tests.conformance import virtual_engine
from tests.conformance.factors import (
    BATCH,
    DIM,
    ENGINES,
    HYBRID,
    SLOW,
    USERS,
    Factors,
    ratings,
    rows_of,
    tables,
    train,
)
from tests.conformance.rows import launched


@pytest.mark.parametrize("run", ENGINES)
@pytest.mark.parametrize(
    ("key", "error"),
    [
        (-1, "table 'users' has rows 0 to 1099511627775, and none of key -1"),
        (2**40, "none of key 1099511627776"),
        (2.5, "table 'users': keys are whole numbers, and these are torch.float"),
    ],
)
def test_keys_that_are_none(run: Any, key: float, error: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=error):
        run(partial(launched, partial(misuse, key=key), tmp_path), strategy="ps-bsp", workers=2, out=tmp_path / "run")


@pytest.mark.parametrize("run", ENGINES)
@pytest.mark.parametrize("strategy", ["single", "ps-bsp", "ps-asp", f"{HYBRID}:servers=1"])
def test_gradients_that_are_not_finite(run: Any, strategy: str, tmp_path: Path) -> None:
    script = partial(launched, partial(misuse, factor=float("nan")), tmp_path)
    with pytest.raises(RunFailed, match="the gradient of parameter 'row 12 of table users' on rank 0 is not finite"):
        run(script, strategy=strategy, workers=1, out=tmp_path / "run")


@pytest.mark.parametrize("strategy", ["single", "ps-asp"])
def test_a_table_that_the_model_gets_after_prepare(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="the model has got table 'late' after prepare"):
        virtual_engine.run(partial(launched, extend, tmp_path), strategy=strategy, workers=1, out=tmp_path / "run")


def extend(worker: Worker, out: Path) -> None:
    model: Any = tables("sgd")
    loader: Any = DataLoader(ratings(), batch_size=BATCH)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    model.late = ShardedEmbedding(9, DIM, optimizer="sgd", name="late", dtype=torch.float64)
    for users, items, _ in loader:
        updater.zero_grad()
        (model(USERS[users], items) + model.late(items % 9).sum(dim=1)).sum().backward()
        updater.step()


@pytest.mark.parametrize("run", ENGINES)
def test_a_table_of_no_prepared_model_that_nobody_updates(run: Any, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"rank 0: table 'beside' .* nobody updates it by the gradients"):
        run(partial(launched, beside, tmp_path), strategy="ps-asp", workers=1, out=tmp_path / "run")


def test_a_table_of_no_prepared_model_that_each_worker_updates(tmp_path: Path) -> None:
    script = partial(launched, partial(beside, updates=True), tmp_path)
    with pytest.raises(RunFailed, match=r"table 'beside' .* is updated batch after batch by each worker alone"):
        virtual_engine.run(script, strategy="ps-bsp", workers=2, out=tmp_path / "run")
    virtual_engine.run(script, strategy="ps-bsp", workers=1, out=tmp_path / "alone")


@pytest.mark.parametrize("use", ["target", "log", "dropped"])
def test_a_table_of_no_prepared_model_that_is_not_trained(use: str, tmp_path: Path) -> None:
    script = partial(launched, partial(beside, use=use), tmp_path)
    virtual_engine.run(script, strategy="ps-bsp", workers=2, out=tmp_path / "run")


def beside(worker: Worker, out: Path, *, updates: bool = False, use: str = "trained") -> None:
    """Train with a table that `prepare` is not given."""
    model, own = tables("sgd"), ShardedEmbedding(9, DIM, optimizer="sgd:lr=0.1", name="beside", dtype=torch.float64)
    loader: Any = DataLoader(ratings(), batch_size=BATCH)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for users, items, _ in loader:
        updater.zero_grad()
        rows = own(items % 9).sum(dim=1)
        term = {"target": rows.detach(), "log": rows.mean().item()}.get(use, rows)
        (model(USERS[users], items) + term).mean().backward()
        if use == "dropped":
            own.drop_gradients()
        if updates:
            own.update()
        updater.step()


def misuse(worker: Worker, out: Path, *, key: float = 12, factor: float = 1.0, only_on: int | None = None) -> None:
    model: Any = tables("sgd")
    loader: Any = DataLoader(ratings(), batch_size=BATCH)
    if only_on in (None, worker.rank):
        model.users.register_forward_hook(lambda module, keys, rows: rows * factor)  # the bias' gradient is finite
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _ in loader:
        model(torch.tensor([key]), torch.tensor([0])).sum().backward()
        updater.step()
        updater.zero_grad()


@pytest.mark.parametrize("strategy", ["ps-bsp:codec=bf16", "all-reduce:codec=bf16"])
def test_an_optimizer_of_sparse_gradients_alone_is_refused_where_whole_ones_move(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"SparseAdam takes sparse gradients alone.*'weight'.*use SGD or Adagrad"):
        virtual_engine.run(
            partial(launched, train_sparsely, tmp_path), strategy=strategy, workers=2, out=tmp_path / "run"
        )


def train_sparsely(worker: Worker, out: Path) -> None:
    model = nn.Embedding(10, 3, sparse=True)
    worker.prepare(model, torch.optim.SparseAdam(model.parameters()), DataLoader(ratings(), batch_size=BATCH))


@pytest.mark.parametrize("nonfinite", ["skip", "allow"])
@pytest.mark.parametrize("strategy", ["ps-bsp", f"{HYBRID}:servers=2"])
def test_what_becomes_of_a_step_with_a_row_that_is_not_finite(strategy: str, nonfinite: str, tmp_path: Path) -> None:
    """On all workers it is left out whole, or refused by the table, which takes none."""
    script = partial(launched, partial(misuse, factor=float("inf"), only_on=1), tmp_path)
    run = partial(virtual_engine.run, script, strategy=strategy, workers=2, out=tmp_path / "run")
    if nonfinite == "allow":
        with pytest.raises(RunFailed, match="table 'users': the gradient of key 12 is not finite"):
            run(options={"nonfinite": nonfinite})
        return
    run(options={"nonfinite": nonfinite}, max_steps=5)
    assert rows_of(tmp_path)["users.keys"].tolist() == []
    assert not read_model_file(tmp_path / "run" / MODEL_FILE)["bias"].any()


@pytest.mark.parametrize("strategy", ["all-reduce", "async-diloco", pytest.param("gossip", marks=SLOW)])
def test_strategies_without_a_place_for_rows_refuse_them(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="ps-asp, all-reduce with servers=1 or more, or single with one worker"):
        virtual_engine.run(partial(launched, train, tmp_path), strategy=strategy, workers=2, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("strategy", "error"),
    [
        ("all-reduce:rows=asp", "rows=asp has no effect without servers=N"),
        ("all-reduce:table_dir=/tmp", "table_dir=/tmp has no effect without servers=N"),
        ("all-reduce:servers=-1", "servers must be at least 0"),
        ("all-reduce:servers=1:rows=ssp", "rows must be"),
        ("all-reduce:servers=1:aggregate=median", "aggregate=median does not join the rows"),
    ],
)
def test_options_of_rows_that_make_no_sense(strategy: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        build(strategy)


def test_servers_for_rows_of_which_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="servers hold the rows of tables here, and the model has no ShardedEmbedding"):
        virtual_engine.run(
            partial(launched, without_tables, tmp_path),
            strategy="all-reduce:servers=1",
            workers=2,
            out=tmp_path / "run",
        )


def without_tables(worker: Worker, out: Path) -> None:
    model = nn.Linear(1, 1)
    worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(ratings(), batch_size=BATCH))


def test_an_aggregate_that_rows_do_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="aggregate=median does not join the rows"):
        virtual_engine.run(
            partial(launched, train, tmp_path),
            strategy="ps-bsp",
            workers=3,
            options={"aggregate": "median"},
            out=tmp_path / "run",
        )


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("same_names", "two tables are called 'users'"),
        ("own_seed", "the list of the model's tables differs"),
    ],
)
def test_tables_that_cannot_be_told_apart_or_differ(script: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=error):
        virtual_engine.run(
            partial(launched, globals()[script], tmp_path), strategy="ps-bsp", workers=2, out=tmp_path / "run"
        )


def same_names(worker: Worker, out: Path) -> None:
    users, items = (ShardedEmbedding(9, DIM, optimizer="sgd", name="users") for _ in range(2))
    model = Factors(users, items)
    worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(ratings()))


def own_seed(worker: Worker, out: Path) -> None:
    torch.manual_seed(worker.rank)
    table = ShardedEmbedding(9, DIM, optimizer="sgd", name="users")
    model = Factors(table, nn.Embedding(1, 1))
    worker.prepare(model, torch.optim.SGD([model.bias], lr=0.1), DataLoader(ratings()))
