"""How workers read rows of tables on servers: with few bytes, together, again, and ahead; the same rows however."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import UsageError
from paceline.messages import Kind, Message
from paceline.nn import ShardedEmbedding, read_ahead, read_together
from paceline.server.server_core import ServerCore
from paceline.training.worker import Worker
from tests.conformance import virtual_engine
from tests.conformance.factors import (
    BATCH,
    DIM,
    ENGINES,
    HYBRID,
    NUM_STEPS,
    USERS,
    Factors,
    ratings,
    rows_of,
    tables,
    train,
)
from tests.conformance.rows import launched


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """What servers have been asked, in order."""
    messages: list[Message] = []
    receive = ServerCore.receive

    def noted(core: ServerCore, message: Message, now_s: float) -> object:
        messages.append(message)
        return receive(core, message, now_s)

    monkeypatch.setattr(ServerCore, "receive", noted)
    return messages


def num_of(kind: Kind, asked: list[Message], *, since: bool = False) -> int:
    """How many of this kind there are, of those alone that ask what has changed since rows were read ahead if so."""
    return sum(message.kind is kind and (not since or "since" in message.body) for message in asked)


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


def test_rows_come_while_a_worker_computes_and_pushes(tmp_path: Path) -> None:
    """Those of all batches but the first, so that a step takes as much less as they take on the worker's link."""
    rows_s, steps_s = 2000 * (8 + 4 * 64) * 8 / 1e9, []
    for reads_ahead in (False, True):
        script, out = partial(launched, partial(read_many, reads_ahead=reads_ahead), tmp_path), tmp_path / "run"
        first, *_, last = virtual_engine.run(script, strategy="ps-asp:servers=2", workers=1, out=out).steps
        steps_s.append((last.time_s - first.time_s) / (last.step - first.step))
    assert 0.8 * rows_s < steps_s[0] - steps_s[1] < 1.05 * rows_s


def read_many(worker: Worker, out: Path, *, reads_ahead: bool = False) -> None:
    table: Any = ShardedEmbedding(10**12, 64, optimizer="sgd", name="many")
    model: Any = nn.Sequential(table, nn.Linear(64, 1))
    data = TensorDataset(torch.arange(8000) * 12345)
    loader: Any = DataLoader(data, batch_size=2000)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    batches: Any = read_ahead(loader, lambda batch: [(table, batch[0].repeat(3))]) if reads_ahead else loader
    for (keys,) in batches:
        updater.zero_grad()
        model(keys.repeat(3)).mean().backward()
        updater.step()


def test_rows_are_read_together_and_kept(tmp_path: Path, asked: list[Message]) -> None:
    """One worker alone makes updates, and its copies have them at once where the optimizer keeps nothing."""
    moved, run = {}, virtual_engine.run
    for name, strategy in (
        ("single", "single"),
        ("asks", "ps-ssp:servers=2"),
        ("keeps", "ps-ssp:servers=2:row_staleness=3"),
        ("hybrid", f"{HYBRID}:servers=1:row_staleness=3"),
    ):
        out = tmp_path / name
        out.mkdir()
        asked.clear()
        script = partial(launched, read_and_train, out)
        result = run(script, strategy=strategy, workers=1, out=out / "run", max_steps=12)
        torch.testing.assert_close(rows_of(tmp_path / "single"), rows_of(out))
        moved[name] = sum(record.moved_bytes for record in result.steps)
        counted = {record.name: record.value for record in result.logged}
        assert num_of(Kind.READ_ROWS, asked) <= 2 * len(result.steps)
        assert bool(counted) == (name in ("keeps", "hybrid"))
        assert not counted or 0.4 * counted["rows_read"] < counted["rows_kept"] < counted["rows_read"]
        if name == "keeps":
            assert moved["keeps"] <= moved["asks"] - counted["rows_kept"] * (8 + 8 * DIM)


class Together(Factors):
    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        tables: Any = self.users, self.items
        user, item = read_together(list(zip(tables, (USERS[users], items), strict=True)))
        return (user * item).sum(dim=1) + self.bias.mean()


def read_and_train(worker: Worker, out: Path) -> None:
    own = tables("sgd:lr=0.1")
    model: Any = Together(own.users, own.items)
    loader: Any = DataLoader(ratings(), batch_size=BATCH, shuffle=True)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for number, (users, items, wanted) in enumerate(loader):
        model.users.lr = 0.1 / (1 + number)
        updater.zero_grad()
        (model(users, items) - wanted).square().mean().backward()
        updater.step()
    with pytest.raises(UsageError, match="table 'users' comes twice"):
        read_together([(model.users, users), (model.users, users)])


@pytest.mark.parametrize("run", ENGINES)
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("single", 1),
        ("ps-bsp:servers=2", 2),
        ("ps-asp:servers=2:row_staleness=2", 1),
        ("all-reduce:servers=2", 2),
    ],
)
def test_rows_that_are_read_ahead_are_the_same(run: Any, strategy: str, workers: int, tmp_path: Path) -> None:
    """Bit for bit, with evaluations and checkpoints between steps, and in a run that ends within a pass."""
    found = []
    for reads_ahead in (False, True):
        out = tmp_path / str(reads_ahead)
        out.mkdir()
        result = run(
            partial(launched, partial(train, optimizer="adam:lr=0.05", reads_ahead=reads_ahead), out),
            strategy=strategy,
            workers=workers,
            out=out / "run",
            eval_every=3,
            checkpoint_every=4,
            max_steps=16,
            **({} if strategy == "single" else {"servers_are_local": False}),
        )
        errors = [record.metrics["error"] for record in result.evaluations]
        found.append((errors, len(result.steps), {name: each.tolist() for name, each in rows_of(out).items()}))
    assert found[0] == found[1]
    assert found[0][1] == 16 * workers


@pytest.mark.parametrize("run", ENGINES)
@pytest.mark.parametrize("strategy", ["ps-bsp:servers=2", "all-reduce:servers=2"])
def test_rows_of_a_smaller_last_batch_are_read_ahead(run: Any, strategy: str, tmp_path: Path) -> None:
    """Each worker's last batch is smaller, and comes ahead as all others."""
    found = []
    for reads_ahead in (False, True):
        out = tmp_path / str(reads_ahead)
        out.mkdir()
        script = partial(launched, partial(train, optimizer="adam:lr=0.05", reads_ahead=reads_ahead), out)
        result = run(script, strategy=strategy, workers=2, out=out / "run", servers_are_local=False)
        for worker in range(2):
            *others, last = (record.samples for record in result.steps if record.worker == worker)
            assert others == [BATCH] * NUM_STEPS
            assert 0 < last < BATCH
        found.append({name: each.tolist() for name, each in rows_of(out).items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("number", [0, 1])
def test_a_table_that_is_looked_up_twice_a_batch_is_read_ahead_for_one_of_both(
    number: int, tmp_path: Path, asked: list[Message]
) -> None:
    """Whichever look-up it is whose keys were told."""
    look_twice_on(tmp_path / "plain", None)
    asked.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look_twice_on(tmp_path / "ahead", number)
    torch.testing.assert_close(rows_of(tmp_path / "plain"), rows_of(tmp_path / "ahead"))
    of_servers = 2 * (TWICE_BATCHES - 1)
    assert num_of(Kind.READ_AHEAD, asked) == num_of(Kind.READ_ROWS, asked, since=True) == of_servers
    assert num_of(Kind.READ_ROWS, asked) == 2 * 2 * TWICE_BATCHES


def test_who_reads_other_rows_ahead_than_the_model_is_told_so_once(tmp_path: Path, asked: list[Message]) -> None:
    look_twice_on(tmp_path / "plain", None)
    asked.clear()
    with pytest.warns(UserWarning, match="keys of table 'twice' that no look-up of their batch") as told:
        look_twice_on(tmp_path / "ahead", 2)
    assert len([each for each in told if "read_ahead" in str(each.message)]) == 1
    torch.testing.assert_close(rows_of(tmp_path / "plain"), rows_of(tmp_path / "ahead"))
    assert not num_of(Kind.READ_ROWS, asked, since=True)


def leave_early(worker: Worker, out: Path) -> None:
    """Passes of which the script takes four batches, each in another order."""
    table = ShardedEmbedding(10**12, DIM, optimizer="sgd", name="early")
    model: Any = nn.Sequential(table, nn.Linear(DIM, 1))
    loader: Any = DataLoader(TensorDataset(torch.arange(400) * 12345), batch_size=50, shuffle=True)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _ in range(3):
        for number, (keys,) in enumerate(read_ahead(loader, lambda batch: [(table, batch[0])])):
            updater.zero_grad()
            model(keys).square().mean().backward()
            updater.step()
            if number == 3:
                break


def test_who_leaves_a_pass_early_is_told_nothing(tmp_path: Path, asked: list[Message]) -> None:
    """What was under way for the batch that does not come is no fault of the script's."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        virtual_engine.run(
            partial(launched, leave_early, tmp_path), strategy="ps-bsp:servers=2", workers=1, out=tmp_path / "run"
        )
    assert num_of(Kind.READ_AHEAD, asked) == 2 * 3 * 4  # two servers, and all batches of a pass but the first
    assert num_of(Kind.READ_ROWS, asked, since=True) == 2 * 3 * 3


TWICE_BATCHES, TWICE_BATCH = 6, 50


class Twice(nn.Module):
    def __init__(self, table: ShardedEmbedding) -> None:
        super().__init__()
        self.table, self.dense = table, nn.Linear(DIM, 1)

    def forward(self, keys: Tensor) -> Tensor:
        joined: Tensor = self.dense(self.table(keys) * self.table(keys + 1))
        return joined


def look_twice_on(out: Path, number: int | None) -> None:
    out.mkdir()
    script = partial(launched, partial(look_twice, number=number), out)
    virtual_engine.run(script, strategy="ps-bsp:servers=2", workers=1, out=out / "run")


def look_twice(worker: Worker, out: Path, *, number: int | None) -> None:
    """Which look-up's keys are told before: 0, 1 or, where there is none with them, another number."""
    torch.manual_seed(5)
    table = ShardedEmbedding(10**12, DIM, optimizer="adagrad:lr=0.1", name="twice")
    model: Any = Twice(table)
    loader: Any = DataLoader(TensorDataset(torch.arange(TWICE_BATCHES * TWICE_BATCH) * 12345), batch_size=TWICE_BATCH)
    model, updater, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    batches = loader if number is None else read_ahead(loader, lambda batch: [(table, batch[0] + number)])
    for (keys,) in batches:
        updater.zero_grad()
        model(keys).square().mean().backward()
        updater.step()
