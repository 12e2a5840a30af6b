"""What scripts do with `nn.Embedding(sparse=True)` besides: it trains as in one process, or is refused in words."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, SparseAdam
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import RunFailed
from paceline.training.worker import Worker
from tests.conformance import virtual_engine
from tests.conformance.factors import DIM, NUM_ITEMS, Factors, ratings, rows_of, step, tables
from tests.conformance.reference import Reference
from tests.conformance.rows import keep, kept, launched

BATCH = 5


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (
            "betas",
            r"rows of 'weight' are updated from adam to adam:beta1=0.5:beta2=0.9, of which only the learning rate may",
        ),
        ("weights", r"the script changed parameters in place.*'weight'"),
        ("values", r"the script changed parameters in place.*'weight'"),
        ("gradients", r"the gradient of parameter 'weight' on rank 0 is not finite"),
        ("dense", r"the gradient of 'weight' is dense, and SparseAdam takes sparse ones alone"),
    ],
)
def test_what_servers_cannot_honour_is_refused(spoil: str, error: str, tmp_path: Path) -> None:
    training = partial(launched, partial(train_and_spoil, spoil=spoil), tmp_path)
    with pytest.raises(RunFailed, match=error):
        virtual_engine.run(training, strategy="ps-bsp", workers=1, out=tmp_path / "run")


def train_and_spoil(worker: Worker, out: Path, *, spoil: str) -> None:
    model: Any = nn.Embedding(10, 3, sparse=True)
    loader: Any = DataLoader(TensorDataset(torch.arange(10).repeat(4)), batch_size=4)
    model, updater, loader = worker.prepare(model, SparseAdam(model.parameters()), loader)
    for number, (keys,) in enumerate(loader):
        updater.zero_grad()
        loss = model(keys).square().mean()
        if number == 2:
            if spoil == "betas":
                updater.param_groups[0]["betas"] = (0.5, 0.9)
            elif spoil == "weights":
                with torch.no_grad():
                    model.weight.mul_(0.5)
            elif spoil == "values":
                model.weight.data.mul_(0.5)
            elif spoil == "gradients":
                loss = loss * float("inf")
            else:
                loss = loss + model.weight.mean()
        loss.backward()
        updater.step()


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp:servers=2"])
def test_a_weight_that_is_used_outside_of_its_layer_trains_alike(strategy: str, tmp_path: Path) -> None:
    training = partial(launched, tie, tmp_path)
    virtual_engine.run(training, strategy=strategy, workers=2, out=tmp_path / "run")
    torch.testing.assert_close(kept(tmp_path, "tied-1"), train_tied(Reference(2)).state_dict())


def tie(worker: Worker, out: Path) -> None:
    keep(out, f"tied-{worker.rank}", train_tied(worker).state_dict())


def train_tied(worker: Any) -> nn.Module:
    """Keys are told from their rows by the same weight."""
    torch.manual_seed(5)
    model: Any = nn.Embedding(20, DIM, sparse=True, dtype=torch.float64)
    loader: Any = DataLoader(TensorDataset(torch.arange(20).repeat(3)), batch_size=BATCH, shuffle=True)
    model, updater, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    for (keys,) in loader:
        updater.zero_grad()
        nn.functional.cross_entropy(model(keys) @ model.weight.T, keys).backward()
        updater.step()
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp:servers=2"])
def test_a_row_that_is_not_finite_leaves_the_step_out_on_all_workers(strategy: str, tmp_path: Path) -> None:
    training = partial(launched, overflow, tmp_path)
    options = {"nonfinite": "skip"}
    virtual_engine.run(training, strategy=strategy, workers=2, out=tmp_path / "run", options=options)
    weights = [kept(tmp_path, f"weight-{rank}") for rank in range(2)]
    assert torch.equal(*weights)
    torch.testing.assert_close(weights[0], kept(tmp_path, "wanted"))


def overflow(worker: Worker, out: Path) -> None:
    """Each key comes once, so that each row but those of the second step is halved once."""
    model: Any = nn.Embedding(40, 2, sparse=True, _weight=torch.ones(40, 2))
    loader: Any = DataLoader(TensorDataset(torch.arange(40)), batch_size=5)
    model, updater, loader = worker.prepare(model, SGD(model.parameters(), lr=0.5), loader)
    wanted = torch.ones(40, 2)
    for number, (keys,) in enumerate(loader):
        updater.zero_grad()
        factor = float("inf") if number == 1 and worker.rank == 1 else 10.0  # both workers' batches are ten keys
        (model(keys).square().sum(dim=1) / 2 * factor).mean().backward()
        updater.step()
        if number != 1:
            everyone = torch.zeros(40)
            everyone[keys] = 1.0
            worker.all_reduce(everyone)
            wanted[everyone > 0] = 0.5
    keep(out, f"weight-{worker.rank}", model.weight.detach())
    keep(out, "wanted", wanted)


def test_beside_a_table_of_rows(tmp_path: Path) -> None:
    found = []
    for strategy in ("single", "ps-asp:servers=2"):
        out = tmp_path / strategy.partition(":")[0]
        out.mkdir()
        virtual_engine.run(partial(launched, factorise, out), strategy=strategy, workers=1, out=out / "run")
        found.append({"items": kept(out, "items"), **rows_of(out)})
    torch.testing.assert_close(found[1], found[0])


def factorise(worker: Worker, out: Path) -> None:
    model: Any = Factors(tables("adagrad:lr=0.3").users, nn.Embedding(NUM_ITEMS, DIM, sparse=True, dtype=torch.float64))
    loader: Any = DataLoader(ratings(), batch_size=BATCH)
    model, updater, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        step(model, updater, batch)
    keep(out, "items", model.items.weight.detach())


def test_ranks_that_average_rows_of_other_optimizers_are_told(tmp_path: Path) -> None:
    told = "rank 0 is at a step of 'words' and rank 1 at a step of 'items'"
    with pytest.raises(RunFailed, match=told):
        virtual_engine.run(use_one_of_two, strategy="ps-bsp:combine=always", workers=2, out=tmp_path / "run")


class WordsOrItems(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Embedding(10, 3, sparse=True) for _ in range(2))

    def forward(self, keys: Tensor, at: int) -> Tensor:
        rows: Tensor = self.layers[at](keys)
        return rows


def use_one_of_two() -> None:
    worker = paceline.init()
    model: Any = WordsOrItems()
    words, items = (SGD(layer.parameters(), lr=0.1) for layer in model.layers)
    data: Any = DataLoader(TensorDataset(torch.arange(10).repeat(4)), batch_size=4)
    prepared: Any = worker.prepare(model=model, words=words, items=items, data=data)
    model, words, items, data = prepared
    for number, (keys,) in enumerate(data):
        at = worker.rank if number == 2 else 0
        model(keys, at).square().mean().backward()
        (words, items)[at].step()


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp:servers=2"])
@pytest.mark.parametrize("is_last", [False, True], ids=["the table first", "the table last"])
def test_a_rank_whose_batches_have_no_keys(strategy: str, is_last: bool, tmp_path: Path) -> None:
    """The table has an optimizer of its own, which a backward pass there does not come to."""
    training = partial(launched, partial(keep_rare, is_last=is_last), tmp_path)
    virtual_engine.run(training, strategy=strategy, workers=2, out=tmp_path / "run")
    torch.testing.assert_close(kept(tmp_path, "rare-1"), train_rarely(Reference(2), is_last=is_last).state_dict())


def keep_rare(worker: Worker, out: Path, *, is_last: bool) -> None:
    keep(out, f"rare-{worker.rank}", train_rarely(worker, is_last=is_last).state_dict())


class Rarely(nn.Module):
    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.layer = nn.Embedding(20, DIM, sparse=True).double(), nn.Linear(DIM, DIM).double()
        self.is_last = is_last

    def forward(self, keys: Tensor) -> Tensor:
        given, is_there = torch.ones(len(keys), DIM, dtype=torch.float64), keys >= 0
        hidden = self.layer(given) if self.is_last else given
        if is_there.any():
            hidden = hidden.index_add(0, is_there.nonzero()[:, 0], self.table(keys[is_there]))
        return hidden if self.is_last else self.layer(hidden)  # type: ignore[no-any-return]


def train_rarely(worker: Any, *, is_last: bool) -> nn.Module:
    """Of two batches of one sample, the second has a key in every third step."""
    model: Any = Rarely(is_last=is_last)
    numbers = torch.arange(24)
    keys = torch.where((numbers % 2 == 0) | (numbers % 6 == 5), numbers % 20, -1)
    rows, dense, data = SparseAdam([model.table.weight], lr=0.1), SGD(model.layer.parameters(), lr=0.1), DataLoader
    model, rows, dense, loader = worker.prepare(model=model, rows=rows, dense=dense, data=data(TensorDataset(keys)))
    for (own,) in loader:
        rows.zero_grad()
        dense.zero_grad()
        model(own).square().mean().backward()
        rows.step()
        dense.step()
    return model  # type: ignore[no-any-return]


def halve(gradient: Tensor) -> Tensor:
    return gradient / 2


def halve_in_place(weight: Any) -> None:
    weight.grad.mul_(0.5)


def clip(gradient: Tensor) -> Tensor:
    gradient = gradient.coalesce()
    return torch.sparse_coo_tensor(gradient.indices(), gradient.values().clamp(-0.01, 0.01), gradient.shape)


@pytest.mark.parametrize(("hook", "is_after"), [(halve, False), (halve_in_place, True), (clip, False)])
def test_hooks_on_gradients_of_rows(hook: Any, is_after: bool, tmp_path: Path) -> None:
    training = partial(launched, partial(keep_hooked, hook=hook, is_after=is_after), tmp_path)
    run = partial(virtual_engine.run, training, strategy="all-reduce", workers=2, out=tmp_path / "run")
    if hook is clip:
        with pytest.raises(RunFailed, match="a hook of the script on the gradient of 'weight' clips it"):
            run()
        return
    run()
    torch.testing.assert_close(
        kept(tmp_path, "hooked-1"), train_hooked(Reference(2), hook=hook, is_after=is_after).state_dict()
    )


def keep_hooked(worker: Worker, out: Path, **settings: Any) -> None:
    keep(out, f"hooked-{worker.rank}", train_hooked(worker, **settings).state_dict())


def train_hooked(worker: Any, *, hook: Any, is_after: bool) -> nn.Module:
    torch.manual_seed(5)
    model: Any = nn.Embedding(20, DIM, sparse=True, dtype=torch.float64)
    (model.weight.register_post_accumulate_grad_hook if is_after else model.weight.register_hook)(hook)
    loader: Any = DataLoader(TensorDataset(torch.arange(20).repeat(2)), batch_size=BATCH, shuffle=True)
    model, updater, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    for (keys,) in loader:
        updater.zero_grad()
        model(keys.repeat(2)).square().mean().backward()
        updater.step()
    return model  # type: ignore[no-any-return]


def test_a_script_saves_the_state_of_a_weight_that_is_frozen_by_now(tmp_path: Path) -> None:
    training = partial(launched, freeze_and_save, tmp_path)
    virtual_engine.run(training, strategy="ps-bsp:servers=2", workers=2, out=tmp_path / "run")
    state = kept(tmp_path, "saved")
    assert {at: tuple(each["exp_avg"].shape) for at, each in state.items()} == {0: (10, 2), 1: (10, 3)}


class Two(nn.ModuleList):
    def forward(self, keys: Tensor) -> Tensor:
        return torch.cat([layer(keys) for layer in self], dim=1)


def freeze_and_save(worker: Worker, out: Path) -> None:
    layers: Any = Two(nn.Embedding(10, dim, sparse=True) for dim in (2, 3))
    loader: Any = DataLoader(TensorDataset(torch.arange(10).repeat(2)), batch_size=5)
    layers, updater, loader = worker.prepare(layers, SparseAdam(layers.parameters()), loader)
    for (keys,) in loader:
        updater.zero_grad()
        layers(keys).square().mean().backward()
        updater.step()
        layers[0].requires_grad_(False)
    with worker.meeting("the end"), worker.global_model():
        state = worker.optimizer_state(updater)["state"]
    if worker.rank == 0:
        keep(out, "saved", state)
