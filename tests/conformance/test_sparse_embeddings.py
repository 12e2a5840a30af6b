"""`nn.Embedding(sparse=True)` in a script: a run equals one process, and moves the rows of its batches alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import RunFailed
from paceline.training.worker import Worker
from tests.conformance import local_engine, virtual_engine
from tests.conformance.factors import ENGINES, SLOW
from tests.conformance.reference import Reference
from tests.conformance.rows import keep, kept, launched

NUM_WORDS, NUM_ITEMS, DIM, BATCH, MOST = 40, 12, 4, 5, 4
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": partial(SGD, lr=0.3),
    "adagrad": partial(Adagrad, lr=0.3, initial_accumulator_value=0.1),
    "sparse-adam": partial(SparseAdam, lr=0.05, betas=(0.8, 0.99)),
}


class Bags(nn.Module):
    """Bags of words, some of them empty, beside items, of which one stands for none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.EmbeddingBag(NUM_WORDS, DIM, mode="mean", sparse=True, dtype=torch.float64)
        self.items = nn.Embedding(NUM_ITEMS, DIM, sparse=True, padding_idx=0, dtype=torch.float64)
        self.bias = nn.Parameter(torch.zeros(24, dtype=torch.float64))

    def forward(self, words: Tensor, counts: Tensor, items: Tensor) -> Tensor:
        is_there = torch.arange(MOST) < counts[:, None]
        bags = self.words(words[is_there], counts.cumsum(0) - counts)
        product: Tensor = (bags * self.items(items)).sum(dim=1)
        return product + self.bias.mean()


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    draw = partial(torch.randint, generator=generator)
    num = 2 * BATCH * 8 + 3
    words, counts, items = draw(0, NUM_WORDS // 2, (num, MOST)), draw(0, MOST + 1, (num,)), draw(0, NUM_ITEMS, (num,))
    return TensorDataset(words, counts, items, torch.randn(num, generator=generator, dtype=torch.float64))


def train(worker: Any, *, optimizer: str = "adagrad", apart: str = "first", fails_at: int | None = None) -> Bags:
    """
    Args:
        apart: the weights have an optimizer of their own, the first or the second; or have none.
    """
    model: Any = Bags()
    weights = [model.words.weight, model.items.weight]
    rows: Any = OPTIMIZERS[optimizer](weights if apart else model.parameters())
    dense: Any = SGD([model.bias], lr=0.1)
    data: Any = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    optimizers = {"first": [rows, dense], "second": [dense, rows]}.get(apart, [rows])
    named = {f"optimizer-{number}": each for number, each in enumerate(optimizers)}
    model, *optimizers, data = worker.prepare(model=model, **named, data=data)
    worker.evaluation(evaluate)
    schedule = ExponentialLR(rows, 0.9)
    for number, (words, counts, items, wanted) in enumerate(data):
        for each in optimizers:
            each.zero_grad()
        (model(words, counts, items) - wanted).square().mean().backward()
        for each in optimizers:
            each.step()
        schedule.step()
        if number == fails_at:
            raise RuntimeError("scripted failure")
    model.rows_state = rows.state_dict()["state"]
    return model  # type: ignore[no-any-return]


def evaluate(model: Any) -> dict[str, float]:
    words, counts, items, wanted = samples().tensors
    return {"error": float((model(words, counts, items) - wanted).square().mean())}


def script(worker: Worker, out: Path, **settings: Any) -> None:
    model = train(worker, **settings)
    keep(out, f"model-{worker.rank}", model.state_dict())
    keep(out, f"state-{worker.rank}", model.rows_state)


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(flat(found), flat(wanted))


def flat(state: Any, name: str = "") -> dict[str, Tensor]:
    """What there is in nested mappings, whether it is a number or a tensor."""
    if isinstance(state, dict):
        return {key: each for place, value in state.items() for key, each in flat(value, f"{name}.{place}").items()}
    return {} if state is None else {name: torch.as_tensor(state).double()}


@pytest.mark.parametrize(
    ("strategy", "workers", "optimizer", "apart", "run"),
    [
        *(("all-reduce", 3, optimizer, "first", virtual_engine.run) for optimizer in OPTIMIZERS),
        *(("ps-bsp:servers=3", 2, optimizer, "first", virtual_engine.run) for optimizer in OPTIMIZERS),
        ("all-reduce", 2, "adagrad", "", virtual_engine.run),
        ("ps-bsp:servers=2", 2, "adagrad", "", virtual_engine.run),
        pytest.param("ps-bsp:servers=2", 2, "sparse-adam", "second", virtual_engine.run, marks=SLOW),
        pytest.param("ps-bsp:combine=always", 2, "sparse-adam", "first", virtual_engine.run, marks=SLOW),
        pytest.param("all-reduce:algorithm=ring", 2, "sparse-adam", "second", virtual_engine.run, marks=SLOW),
        pytest.param("all-reduce", 2, "sparse-adam", "second", local_engine.run, marks=SLOW, id="processes"),
        pytest.param("ps-bsp:servers=2", 2, "sparse-adam", "second", local_engine.run, marks=SLOW, id="ps-processes"),
    ],
)
def test_a_run_equals_one_process(
    strategy: str, workers: int, optimizer: str, apart: str, run: Any, tmp_path: Path
) -> None:
    settings = {"optimizer": optimizer, "apart": apart}
    run(
        partial(launched, partial(script, **settings), tmp_path),
        strategy=strategy,
        workers=workers,
        out=tmp_path / "run",
        eval_every=5,
    )
    twin = train(Reference(workers), **settings)
    for rank in range(workers):
        assert_same(kept(tmp_path, f"model-{rank}"), twin.state_dict())
        assert_same(kept(tmp_path, f"state-{rank}"), twin.rows_state)


@pytest.mark.parametrize("strategy", ["ps-asp:servers=2", pytest.param("ps-ssp:servers=2", marks=SLOW)])
@pytest.mark.parametrize("run", ENGINES)
def test_asynchronous_workers_learn(run: Any, strategy: str, tmp_path: Path) -> None:
    result = run(
        partial(launched, partial(script, optimizer="sgd"), tmp_path),
        strategy=strategy,
        workers=2,
        out=tmp_path / "run",
        eval_every=20,
    )
    errors = [record.metrics["error"] for record in result.evaluations]
    assert errors[-1] < errors[0]


def look_while_training(worker: Worker, out: Path) -> None:
    model: Any = Bags()
    data: Any = DataLoader(samples(), batch_size=BATCH)
    model, optimizer, data = worker.prepare(model, SGD(model.parameters(), lr=0.3), data)
    weight, seen = model.words.weight, []
    for words, counts, items, wanted in data:
        optimizer.zero_grad()
        (model(words, counts, items) - wanted).square().mean().backward()
        optimizer.step()
        before = weight.detach().clone()
        with worker.global_model():
            seen.append(not torch.equal(weight, before))
        assert torch.equal(weight, before)
    keep(out, f"seen-{worker.rank}", torch.tensor(seen))


def test_a_look_at_the_servers_rows_leaves_a_worker_its_own(tmp_path: Path) -> None:
    """Or it would go on with newer ones than without an evaluation."""
    training = partial(launched, look_while_training, tmp_path)
    virtual_engine.run(training, strategy="ps-asp", workers=3, out=tmp_path / "run")
    assert kept(tmp_path, "seen-0").any(), "others have pushed since the first worker's last answer"


def test_one_asynchronous_worker_equals_one_process(tmp_path: Path) -> None:
    virtual_engine.run(
        partial(launched, partial(script, optimizer="sparse-adam"), tmp_path),
        strategy="ps-asp:servers=3",
        workers=1,
        out=tmp_path / "run",
    )
    twin = train(Reference(1), optimizer="sparse-adam")
    assert_same(kept(tmp_path, "model-0"), twin.state_dict())


@pytest.mark.parametrize(
    ("begun", "resumed"),
    [("ps-bsp:servers=3", "ps-bsp:servers=2"), ("all-reduce", "ps-bsp:servers=1"), ("ps-bsp:servers=2", "all-reduce")],
)
def test_a_run_goes_on_elsewhere(begun: str, resumed: str, tmp_path: Path) -> None:
    run = partial(virtual_engine.run, workers=2, checkpoint_every=4)
    training = partial(script, optimizer="sparse-adam")
    with pytest.raises(RunFailed, match="scripted failure"):
        run(
            partial(launched, partial(training, fails_at=6), tmp_path),
            strategy=begun,
            out=tmp_path / "failed",
        )
    run(partial(launched, training, tmp_path), strategy=resumed, out=tmp_path / "run", resume=tmp_path / "failed")
    twin = train(Reference(2), optimizer="sparse-adam")
    assert_same(kept(tmp_path, "model-1"), twin.state_dict())


@pytest.mark.parametrize("run", ENGINES)
@pytest.mark.parametrize(
    ("strategy", "local"),
    [("all-reduce", False), ("ps-bsp:servers=2", True), pytest.param("ps-asp:servers=2", False, marks=SLOW)],
)
def test_the_rows_of_a_batch_move_and_not_the_table(run: Any, strategy: str, local: bool, tmp_path: Path) -> None:
    """Of two workers each sends its rows, and gets those of both."""
    result = run(
        partial(launched, read_few, tmp_path),
        strategy=strategy,
        workers=2,
        out=tmp_path / "run",
        servers_are_local=local,
        max_steps=6,
    )
    row_bytes = 8 + 4 * WIDTH
    rows = [record.moved_bytes / row_bytes for record in result.steps]
    assert FEW < sum(rows) / len(rows) < 1.2 * 3 * FEW + 2000 / row_bytes
    assert max(rows) < 0.1 * MANY


MANY, WIDTH, FEW = 20_000, 64, 200


def read_few(worker: Worker, out: Path) -> None:
    model: Any = nn.Sequential(nn.Embedding(MANY, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
    loader: Any = DataLoader(TensorDataset(torch.arange(MANY)), batch_size=FEW, shuffle=True)
    model, updater, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    for (keys,) in loader:
        updater.zero_grad()
        model(keys.repeat(3)).mean().backward()
        updater.step()
