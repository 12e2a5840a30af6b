"""Rows of tables on servers: what a run makes of them equals one process with `nn.Embedding(sparse=True)`."""

from __future__ import annotations

import copy
import importlib
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
from paceline.planner.observing import observe
from paceline.running.result import Result
from paceline.server.tables.hashing import normal
from paceline.strategies import build
from paceline.training.pauses import MODEL_FILE
from paceline.training.row_tables import ROWS_FILE
from paceline.training.snapshot import read_model_file
from paceline.training.worker import Worker
from tests.conformance import local_engine, virtual_engine
from tests.conformance.reference import Reference
from tests.conformance.rows import keep, kept, launched

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


def tables(optimizer: str) -> Factors:
    torch.manual_seed(5)
    users = ShardedEmbedding(NUM_USERS, DIM, optimizer=optimizer, name="users", dtype=torch.float64)
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


def train(worker: Worker, out: Path, *, optimizer: str = "adagrad:lr=0.3", fails_at: int | None = None) -> None:
    model: Any = tables(optimizer)
    loader: Any = DataLoader(ratings(), batch_size=BATCH, shuffle=True)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    worker.evaluation(evaluate)
    for number, batch in enumerate(loader):
        step(model, updater, batch)
        if number == fails_at:
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


def assert_same_rows(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


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
@pytest.mark.parametrize("strategy", ["ps-asp", HYBRID, pytest.param("ps-ssp", marks=SLOW)])
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
        assert_same_rows(rows_of(tmp_path / "single"), rows_of(out))


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
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = {"strategy": strategy, "workers": 2, "checkpoint_every": 7}
    for out, fails_at in ((whole, None), (broken, 16)):
        out.mkdir()
        script = partial(launched, partial(train, optimizer=optimizer, fails_at=fails_at), out)
        if fails_at is None:
            run(script, out=out / "run", options={"servers": 1}, **settings)
        else:
            with pytest.raises(RunFailed, match="scripted failure"):
                run(script, out=out / "failed", options={"servers": 3}, **settings)
    script = partial(launched, partial(train, optimizer=optimizer), broken)
    run(script, out=broken / "run", resume=broken / "failed", options={"servers": 2}, **settings)
    assert_same_rows(rows_of(whole), rows_of(broken))


@pytest.mark.parametrize("run", ENGINES)
def test_evaluations_change_nothing(run: Any, tmp_path: Path) -> None:
    """A row that was never updated has its first values, and is in no file."""
    run(partial(launched, train, tmp_path), strategy="ps-bsp", workers=2, out=tmp_path / "run", eval_every=3)
    with_none = tmp_path / "none"
    with_none.mkdir()
    run(partial(launched, train, with_none), strategy="ps-bsp", workers=2, out=with_none / "run")
    assert_same_rows(rows_of(tmp_path), rows_of(with_none))
    rows = rows_of(tmp_path)
    assert UNTOUCHED not in rows["users.keys"].tolist()
    first = normal(torch.tensor([UNTOUCHED]), seed=int(rows["users.seed"]), num=DIM)
    seen = [record.metrics["untouched"] for record in Result(tmp_path / "run").evaluations]
    assert len(seen) > 3
    assert seen == pytest.approx([float(first.sum())] * len(seen))


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("run", ENGINES)
def test_few_bytes_move_besides_the_rows(run: Any, local: bool, tmp_path: Path) -> None:
    """A step reads the rows of its batch once each and pushes as many gradients, with their keys."""
    script = partial(launched, read_many, tmp_path)
    result = run(script, strategy="ps-bsp", workers=1, out=tmp_path / "run", servers_are_local=local)
    num_rows, dim = 2000, 64
    moved = [record.moved_bytes for record in result.steps]
    assert len(moved) == 4
    for each in moved:
        assert 2 * num_rows * 4 * dim < each < 1.1 * 2 * num_rows * 4 * dim


def read_many(worker: Worker, out: Path) -> None:
    table: Any = ShardedEmbedding(10**12, 64, optimizer="sgd", name="many")
    model: Any = nn.Sequential(table, nn.Linear(64, 1))
    data = TensorDataset(torch.arange(8000) * 12345)
    loader: Any = DataLoader(data, batch_size=2000)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for (keys,) in loader:
        updater.zero_grad()
        model(keys.repeat(3)).mean().backward()
        updater.step()


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


@SLOW
@pytest.mark.parametrize("strategy", ["ps-bsp", "all-reduce:servers=1"])
def test_gradients_add_up_until_the_step_and_go_with_zero_grad(strategy: str, tmp_path: Path) -> None:
    """Two halves of a batch are as good as the whole; what was found before zero_grad counts nowhere."""
    for name, script in (("halves", in_halves), ("whole", train)):
        out = tmp_path / name
        out.mkdir()
        virtual_engine.run(partial(launched, script, out), strategy=strategy, workers=2, out=out / "run")
    assert_same_rows(rows_of(tmp_path / "halves"), rows_of(tmp_path / "whole"))


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


def test_a_plan_does_not_pass_over_rows(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="plans do not know what the rows of a ShardedEmbedding cost"):
        observe(partial(launched, train, tmp_path))


@pytest.mark.parametrize("separator", ["::", "\t", ","])
def test_ratings_of_movielens_are_read(separator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "recipes" / "embeddings")
    ratings = importlib.import_module("ratings")
    file = tmp_path / "ratings"
    lines = [["userId", "movieId", "rating", "timestamp"], ["1", "661", "3.5", "97"], ["6040", "2", "5", "98"]]
    file.write_text("\n".join(separator.join(line) for line in lines))
    users, items, values = ratings.read(file)
    assert (users.tolist(), items.tolist(), values.tolist()) == ([1, 6040], [661, 2], [3.5, 5.0])
    file.write_text("\n".join(separator.join(line) for line in [*lines, ["one", "2", "3"]]))
    with pytest.raises(ValueError, match="line 4"):
        ratings.read(file)
