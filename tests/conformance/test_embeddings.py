"""Rows of tables on servers: what a run makes of them equals one process with `nn.Embedding(sparse=True)`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import RunFailed, UsageError
from paceline.nn import ShardedEmbedding
from paceline.running.result import Result
from paceline.server.tables.hashing import normal
from paceline.training.worker import Worker
from tests.conformance import virtual_engine
from tests.conformance.factors import (
    BATCH,
    DIM,
    ENGINES,
    HYBRID,
    NUM_ITEMS,
    NUM_STEPS,
    SLOW,
    UNTOUCHED,
    USERS,
    Factors,
    evaluate,
    loss_of,
    ratings,
    rows_of,
    step,
    tables,
    train,
)
from tests.conformance.reference import Reference
from tests.conformance.rows import keep, kept, launched

GAMMA = 0.8


def train_plain(num_workers: int, optimizer: Callable[[Any], torch.optim.Optimizer], *, gamma: float = 1.0) -> Factors:
    """One process, with the batches of all workers together.

    Args:
        gamma: by which the learning rate of the rows changes after each step.
    """
    own = tables("sgd")
    users = nn.Embedding(len(USERS), DIM, sparse=True, dtype=torch.float64)
    items = nn.Embedding(NUM_ITEMS, DIM, sparse=True, dtype=torch.float64)
    with torch.no_grad():
        users.weight.copy_(own.users(USERS))
        items.weight.copy_(own.items(torch.arange(NUM_ITEMS)))
    model = Factors(users, items)
    dense = torch.optim.SGD([model.bias], lr=0.1)
    sparse = optimizer([users.weight, items.weight])
    schedule = torch.optim.lr_scheduler.ExponentialLR(sparse, gamma)
    together = Reference(num_workers).prepare(model, dense, DataLoader(ratings(), batch_size=BATCH, shuffle=True))
    for who, what, wanted in together[2]:
        dense.zero_grad()
        sparse.zero_grad()
        (model(who, what) - wanted).square().mean().backward()
        dense.step()
        sparse.step()
        schedule.step()
    return model


TWINS = {
    "sgd:lr=0.1": partial(torch.optim.SGD, lr=0.1),
    "adagrad:lr=0.3": partial(torch.optim.Adagrad, lr=0.3),
    "adam:lr=0.05": partial(torch.optim.SparseAdam, lr=0.05),
}


@pytest.mark.parametrize("run", ENGINES)
@pytest.mark.parametrize("optimizer", TWINS)
@pytest.mark.parametrize(
    ("strategy", "workers", "options"),
    [
        ("single", 1, {}),
        ("ps-bsp", 2, {"servers": 3}),
        ("all-reduce", 2, {"servers": 3}),
        pytest.param("ps-bsp", 2, {"servers": 5}, marks=SLOW, id="servers-without-parameters"),
        pytest.param("ps-bsp", 2, {}, marks=SLOW),
        pytest.param("ps-bsp", 2, {"servers": 2, "table_mbytes": 0.01}, marks=SLOW, id="in-files"),
        pytest.param("all-reduce", 2, {"servers": 1, "table_mbytes": 0.01}, marks=SLOW, id="all-reduce-in-files"),
    ],
)
def test_rows_equal_a_plain_embedding(
    run: Any, optimizer: str, strategy: str, workers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    script = partial(launched, partial(train, optimizer=optimizer), tmp_path)
    if "table_mbytes" in options:
        options = {**options, "table_dir": str(tmp_path)}
    run(script, strategy=strategy, workers=workers, options=options, out=tmp_path / "run")
    twin = train_plain(workers, TWINS[optimizer])
    rows = rows_of(tmp_path)
    assert rows["users.keys"].tolist() == sorted(USERS.tolist())
    torch.testing.assert_close(rows["users.rows"], twin.users.weight[USERS.argsort()].detach())
    torch.testing.assert_close(rows["items.rows"], twin.items.weight[rows["items.keys"]].detach())
    torch.testing.assert_close(kept(tmp_path, "bias-0"), twin.bias.detach())


@pytest.mark.parametrize("run", ENGINES)
@pytest.mark.parametrize("strategy", ["ps-asp", HYBRID, "ps-ssp:row_staleness=2", pytest.param("ps-ssp", marks=SLOW)])
def test_asynchronous_workers_learn(run: Any, strategy: str, tmp_path: Path) -> None:
    script = partial(launched, train_for_long, tmp_path)
    result = run(script, strategy=f"{strategy}:servers=2", workers=2, out=tmp_path / "run", eval_every=100)
    errors = [record.metrics["error"] for record in result.evaluations]
    assert errors[-1] < 0.5 * errors[0]
    if strategy == HYBRID:  # between two of a worker's, the other's of the same step and of the one before
        assert max(update.staleness for update in result.updates) <= 2


def train_for_long(worker: Worker, out: Path) -> None:
    """Learns what ratings there are by heart."""
    model: Any = tables("adagrad:lr=0.3")
    loader: Any = DataLoader(ratings(), batch_size=BATCH, shuffle=True)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    worker.evaluation(evaluate)
    for _ in range(4):
        for batch in loader:
            step(model, updater, batch)


@pytest.mark.parametrize("run", ENGINES)
def test_one_asynchronous_worker_equals_single(run: Any, tmp_path: Path) -> None:
    for strategy in ("single", "ps-asp", f"{HYBRID}:servers=1"):
        out = tmp_path / strategy.partition(":")[0]
        out.mkdir()
        run(partial(launched, train, out), strategy=strategy, workers=1, out=out / "run")
        torch.testing.assert_close(rows_of(tmp_path / "single"), rows_of(out))


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("single", 1), ("ps-bsp:servers=2", 2), pytest.param("all-reduce:servers=1", 2, marks=SLOW)],
)
@pytest.mark.parametrize("optimizer", ["adagrad:lr=0.3", pytest.param("adam:lr=0.05", marks=SLOW)])
def test_rows_follow_a_schedule(optimizer: str, strategy: str, workers: int, tmp_path: Path) -> None:
    script = partial(launched, partial(train_by_schedule, optimizer=optimizer), tmp_path)
    virtual_engine.run(script, strategy=strategy, workers=workers, out=tmp_path / "run")
    twin = train_plain(workers, TWINS[optimizer], gamma=GAMMA)
    rows = rows_of(tmp_path)
    torch.testing.assert_close(rows["users.rows"], twin.users.weight[USERS.argsort()].detach())
    torch.testing.assert_close(rows["items.rows"], twin.items.weight[rows["items.keys"]].detach())


def train_by_schedule(worker: Worker, out: Path, *, optimizer: str) -> None:
    model: Any = tables(optimizer)
    loader: Any = DataLoader(ratings(), batch_size=BATCH, shuffle=True)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        step(model, updater, batch)
        for table in (model.users, model.items):
            table.lr *= GAMMA


@pytest.mark.parametrize("run", ENGINES)
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("ps-bsp", "adam:lr=0.05"),
        pytest.param("all-reduce", "adam:lr=0.05", marks=SLOW),
        *(pytest.param("ps-bsp", each, marks=SLOW) for each in ("row-wise-adagrad:lr=0.3", "ftrl:lr=0.5:l1=0.01")),
    ],
)
def test_a_run_goes_on_with_another_number_of_servers(run: Any, strategy: str, optimizer: str, tmp_path: Path) -> None:
    assert_resumes(partial(train, optimizer=optimizer), run, strategy, tmp_path)


def test_rows_that_come_late_and_go_are_the_same_on_any_number_of_servers(tmp_path: Path) -> None:
    """Counts of users without a row, and when rows had gradients, go on with the run."""
    script = partial(train, optimizer="adagrad:lr=0.3", min_count=4, evict_after=2)
    assert_resumes(script, virtual_engine.run, "ps-bsp", tmp_path)
    (told,) = (event.details for event in Result(tmp_path / "whole" / "run").events if event.name == "rows")
    assert told["users"]["rows"] == len(rows_of(tmp_path / "whole")["users.keys"])
    assert min(told["users"].values()) > 0
    assert told["items"] == {"rows": NUM_ITEMS // 2, "evicted": 0, "waiting": 0, "dropped": 0}


def assert_resumes(training: partial[None], run: Any, strategy: str, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = {"strategy": strategy, "workers": 2, "checkpoint_every": 7}
    for out, fails_at in ((whole, None), (broken, 16)):
        out.mkdir()
        script = partial(launched, partial(training, fails_at=fails_at), out)
        if fails_at is None:
            run(script, out=out / "run", options={"servers": 1}, **settings)
        else:
            with pytest.raises(RunFailed, match="scripted failure"):
                run(script, out=out / "failed", options={"servers": 3}, **settings)
    run(
        partial(launched, training, broken),
        out=broken / "run",
        resume=broken / "failed",
        options={"servers": 2},
        **settings,
    )
    torch.testing.assert_close(rows_of(whole), rows_of(broken))


@pytest.mark.parametrize("run", ENGINES)
def test_evaluations_change_nothing(run: Any, tmp_path: Path) -> None:
    """A row that was never updated has its first values, and is in no file."""
    run(partial(launched, train, tmp_path), strategy="ps-bsp", workers=2, out=tmp_path / "run", eval_every=3)
    with_none = tmp_path / "none"
    with_none.mkdir()
    run(partial(launched, train, with_none), strategy="ps-bsp", workers=2, out=with_none / "run")
    torch.testing.assert_close(rows_of(tmp_path), rows_of(with_none))
    rows = rows_of(tmp_path)
    assert UNTOUCHED not in rows["users.keys"].tolist()
    first = normal(torch.tensor([UNTOUCHED]), seed=int(rows["users.seed"]), num=DIM)
    seen = [record.metrics["untouched"] for record in Result(tmp_path / "run").evaluations]
    assert len(seen) > 3
    assert seen == pytest.approx([float(first.sum())] * len(seen))


@pytest.mark.parametrize(("strategy", "dtype"), [("ps-bsp", torch.bfloat16), ("ps-ssp:row_staleness=1", torch.float16)])
def test_rows_in_half_precision_move_half_and_train_alike(strategy: str, dtype: torch.dtype, tmp_path: Path) -> None:
    found = []
    for each in (torch.float32, dtype):
        script = partial(launched, partial(learn_planted, dtype=each), tmp_path)
        out = tmp_path / f"{each}-run"
        result = virtual_engine.run(script, strategy=f"{strategy}:servers=2", workers=2, out=out, eval_every=200)
        first, last = (result.evaluations[place].metrics["error"] for place in (0, -1))
        assert last < 0.1 * first
        found.append((last, sum(record.moved_bytes for record in result.steps)))
    (whole_error, whole_bytes), (half_error, half_bytes) = found
    assert half_error == pytest.approx(whole_error, rel=0.1)
    assert half_bytes < 0.65 * whole_bytes  # the rest are keys and parameters


class Shifted(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows = ShardedEmbedding(40, 64, optimizer="adagrad:lr=0.3", dtype=dtype)
        self.shift = nn.Parameter(torch.zeros(64))

    def forward(self, keys: Tensor) -> Tensor:
        shifted: Tensor = self.rows(keys) + self.shift
        return shifted


def learn_planted(worker: Worker, out: Path, *, dtype: torch.dtype) -> None:
    """The rows of 40 keys become those of another table, noise aside."""
    torch.manual_seed(5)
    wanted, model = torch.randn(40, 64), Shifted(dtype)
    loader: Any = DataLoader(TensorDataset(torch.arange(40).repeat(20)), batch_size=40, shuffle=True)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    @worker.evaluation
    def error(model: Any) -> dict[str, float]:
        return {"error": float((model(torch.arange(40)) - wanted).square().mean())}

    for _ in range(5):
        for (keys,) in loader:
            updater.zero_grad()
            noise = 0.1 * torch.randn(len(keys), 64)
            (model(keys) - wanted[keys] - noise).square().sum(dim=1).mean().backward()
            updater.step()


@SLOW
@pytest.mark.parametrize("strategy", ["ps-bsp", "all-reduce:servers=1"])
def test_gradients_add_up_until_the_step_and_go_with_zero_grad(strategy: str, tmp_path: Path) -> None:
    """Two halves of a batch are as good as the whole; what was found before zero_grad counts nowhere."""
    for name, script in (("halves", in_halves), ("whole", train)):
        out = tmp_path / name
        out.mkdir()
        virtual_engine.run(partial(launched, script, out), strategy=strategy, workers=2, out=out / "run")
    torch.testing.assert_close(rows_of(tmp_path / "halves"), rows_of(tmp_path / "whole"))


def in_halves(worker: Worker, out: Path) -> None:
    model: Any = tables("adagrad:lr=0.3")
    loader: Any = DataLoader(ratings(), batch_size=BATCH, shuffle=True)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        with worker.no_sync():
            loss_of(model, batch).backward()
        updater.zero_grad()
        half = len(batch[0]) // 2
        for part, sync in ((slice(half), worker.no_sync()), (slice(half, None), nullcontext())):
            users, items, wanted = (each[part] for each in batch)
            if len(users):
                with sync:
                    (loss_of(model, (users, items, wanted)) * len(users) / len(batch[0])).backward()
        updater.step()


@SLOW
def test_rows_of_late_gradients_are_dropped_with_them(tmp_path: Path) -> None:
    """With a backup worker every update has one worker's rows, and the servers agree on whose."""
    script = partial(launched, partial(train, optimizer="sgd:lr=0.1"), tmp_path)
    options = {"servers": 2, "backup_workers": 1}
    result = virtual_engine.run(script, strategy="ps-bsp", workers=2, options=options, out=tmp_path / "run")
    assert result.iteration >= NUM_STEPS
    assert all(int(rows_of(tmp_path)[f"{name}.updates"]) == result.iteration for name in ("users", "items"))


@SLOW
@pytest.mark.parametrize("run", ENGINES)
@pytest.mark.parametrize("strategy", ["ps-bsp", "all-reduce:servers=2"])
def test_rows_are_updated_with_the_first_of_several_optimizers(run: Any, strategy: str, tmp_path: Path) -> None:
    run(partial(launched, train_with_two, tmp_path), strategy=strategy, workers=2, out=tmp_path / "run", max_steps=12)
    assert int(rows_of(tmp_path)["users.updates"]) == 12


def train_with_two(worker: Worker, out: Path) -> None:
    factors, scale = tables("sgd"), nn.Linear(1, 1, dtype=torch.float64)
    model: Any = factors
    model, scale, first, second, data = worker.prepare(
        factors=model,
        scale=scale,
        first=torch.optim.SGD(model.parameters(), lr=0.1),
        second=torch.optim.SGD(scale.parameters(), lr=0.01),
        data=DataLoader(ratings(), batch_size=BATCH),
    )
    for users, items, wanted in data:
        first.zero_grad()
        second.zero_grad()
        (scale(model(USERS[users], items)[:, None])[:, 0] - wanted).square().mean().backward()
        second.step()
        first.step()


@SLOW
def test_a_copy_of_the_model_looks_at_the_same_rows(tmp_path: Path) -> None:
    virtual_engine.run(partial(launched, copy_model, tmp_path), strategy="ps-bsp", workers=1, out=tmp_path / "run")
    assert kept(tmp_path, "same")


def copy_model(worker: Worker, out: Path) -> None:
    model: Any = tables("sgd:lr=0.5")
    loader: Any = DataLoader(ratings(), batch_size=BATCH)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    twin = copy.deepcopy(model)
    for batch in loader:
        step(model, updater, batch)
    with torch.no_grad():
        keep(out, "same", torch.equal(twin.users(USERS), model.users(USERS)))
    with pytest.raises(UsageError, match="the servers hold the rows"):
        torch.save(model, out / "model.pt")
    with pytest.raises(UsageError, match="table 'users': the servers update its rows"):
        model.users.update()
