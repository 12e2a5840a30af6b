"""Several models, optimizers and loaders in one script."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Subset, TensorDataset

from paceline.errors import RunFailed
from tests.conformance.gan_script import train_gan
from tests.conformance.reference import train_alone
from tests.conformance.scripts import EXACT, assert_close
from tests.conformance.settings import SOON_S
from tests.conformance.several_runs import (
    ENGINES,
    TAKE_ONE,
    TWO_CLIENTS,
    in_double_precision,  # noqa: F401 - for every test
    run,
)

# --- other scripts --------------------------------------------------------------------------------------------------


def points(count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randn(count, 1, generator=generator))


def train_two_halves(worker: Any, *, every: int = 1) -> nn.Module:
    """One model, whose layers have an optimizer each; the second one steps several times an iteration."""
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    model, first, second, data = worker.prepare(
        model=model,
        first=SGD(model[0].parameters(), lr=0.1, momentum=0.9),
        second=Adam(model[2].parameters(), lr=0.01),
        data=DataLoader(points(), batch_size=4, shuffle=True),
    )
    for _ in range(2):
        for number, (x, y) in enumerate(data):
            first.zero_grad()
            second.zero_grad()
            F.mse_loss(model(x), y).backward()
            second.step()
            if number % every == 0:
                first.step()
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp"])
@pytest.mark.parametrize("every", [1, 3])
def test_two_optimizers_of_one_model(engine: str, strategy: str, every: int, tmp_path: Path) -> None:
    script = partial(train_two_halves, every=every)
    result = run(engine, script, tmp_path, strategy)
    assert result.iteration == 12 // every
    assert sum(step.samples for step in result.steps) == 96 - 8 * (every - 1)
    assert_close(result.model_state(), train_alone(script, 2), EXACT)


def test_clients_train_with_two_optimizers(tmp_path: Path) -> None:
    """As well on one worker as on two, and after a resume."""
    settings: dict[str, Any] = {"strategy": "fed-avg", "options": {**TWO_CLIENTS, "optimizer": "kept"}}
    alone = run("virtual", train_two_halves, tmp_path / "alone", workers=1, **settings)
    begun = run("virtual", train_two_halves, tmp_path / "begun", max_steps=1, **settings)
    assert alone.iteration == begun.iteration == 1
    assert_close(begun.model_state(), dict(alone.model_state()), EXACT)
    resumed = run("virtual", train_two_halves, tmp_path / "resumed", resume=tmp_path / "begun", **settings)
    whole = run("virtual", train_two_halves, tmp_path / "whole", **settings)
    assert resumed.iteration == whole.iteration == 2
    torch.testing.assert_close(resumed.model_state(), whole.model_state(), rtol=0, atol=0)


def train_on_two_loaders(worker: Any, *, count: int = 24) -> nn.Module:
    torch.set_default_dtype(torch.float64)
    model = nn.Linear(6, 1)
    model, optimizer, first, second = worker.prepare(
        model=model,
        optimizer=SGD(model.parameters(), lr=0.05),
        first=DataLoader(points(), batch_size=4, shuffle=True),
        second=DataLoader(Subset(points(), range(count)), batch_size=2, shuffle=True),
    )
    for _ in range(2):
        for (x, y), (other_x, other_y) in zip(first, second, strict=True):
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) + F.mse_loss(model(other_x), other_y)).backward()
            optimizer.step()
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp"])
def test_two_loaders(strategy: str, tmp_path: Path) -> None:
    result = run("local", train_on_two_loaders, tmp_path / "whole", strategy)
    assert [step.samples for step in result.steps] == [4] * 24
    assert_close(result.model_state(), train_alone(train_on_two_loaders, 2), EXACT)
    run("local", train_on_two_loaders, tmp_path / "begun", strategy, max_steps=8)
    resumed = run("local", train_on_two_loaders, tmp_path / "resumed", strategy, resume=tmp_path / "begun")
    torch.testing.assert_close(resumed.model_state(), result.model_state(), rtol=0, atol=0)


def test_clients_take_one_loader(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="a client's turn is a pass over its data; prepare one loader"):
        run("virtual", train_on_two_loaders, tmp_path, "fed-avg", options=TWO_CLIENTS)


def test_loaders_whose_batches_count_differently(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"last batches of 'second' differ in size .* drop_last=True"):
        run("virtual", partial(train_on_two_loaders, count=23), tmp_path, "all-reduce")


# --- batches that use only one of two optimizers --------------------------------------------------------------------


class Heads(nn.Module):
    """Two, of which a batch uses one."""

    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.a = nn.Linear(6, 1)
        self.b = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)) if wide else nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, name: str) -> Any:
        return getattr(self, name)(x)


def train_heads(worker: Any, *, wide: bool, steps_both: bool, apart: bool = True) -> nn.Module:
    """Ranks take other heads in the same iteration if they go apart."""
    torch.set_default_dtype(torch.float64)
    heads = Heads(wide=wide)
    heads, first, second, data = worker.prepare(
        heads=heads,
        first=SGD(heads.a.parameters(), lr=0.1),
        second=SGD(heads.b.parameters(), lr=0.1),
        data=DataLoader(points(), batch_size=4),
    )
    for number, (x, y) in enumerate(data):
        first.zero_grad()
        second.zero_grad()
        is_second = (number + worker.rank * apart) % 2
        F.mse_loss(heads(x, "b" if is_second else "a"), y).backward()
        for optimizer in (first, second) if steps_both else (second if is_second else first,):
            optimizer.step()
    return heads


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("steps_both", [False, True])
def test_batches_that_use_one_of_two_optimizers_alike(engine: str, steps_both: bool, tmp_path: Path) -> None:
    script = partial(train_heads, wide=True, steps_both=steps_both, apart=False)
    result = run(engine, script, tmp_path, "all-reduce")
    assert_close(result.model_state(), train_alone(script, 2), EXACT)


ELSEWHERE = "rank 0 is at a {0} of 'first' and rank 1 at a {0} of 'second': every rank must use and step the same"
OTHER_SIZES = "rank 0 (asks )?for all_reduce.* of .*rank 1 for all_reduce.* every rank must make the same calls"
NO_GRADIENT = "parameter '[ab].*weight' has no gradient on rank .*freeze it .* or use all-reduce"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("strategy", "options", "wide", "steps_both", "says"),
    [
        ("all-reduce", {}, False, True, ELSEWHERE.format("backward pass")),
        ("all-reduce", {}, False, False, ELSEWHERE.format("backward pass")),
        ("all-reduce", {}, True, True, OTHER_SIZES),
        ("ps-bsp", {}, False, False, ELSEWHERE.format("step")),
        ("ps-bsp", {"combine": "never"}, False, False, ELSEWHERE.format("step")),
        ("ps-bsp", {}, False, True, NO_GRADIENT),
        ("ps-bsp", {}, True, True, OTHER_SIZES),
        ("ps-asp", {}, False, True, NO_GRADIENT),
        ("ps-ssp", {}, False, True, NO_GRADIENT),
        ("gossip", {}, False, False, ELSEWHERE.format("step")),
        ("gossip", {}, True, False, ELSEWHERE.format("step")),
        ("local-sgd", {"every": 1}, False, False, ELSEWHERE.format("step")),
    ],
)
def test_ranks_that_use_other_optimizers_are_told_apart(
    engine: str, strategy: str, options: Any, wide: bool, steps_both: bool, says: str, tmp_path: Path
) -> None:
    began_s = time.monotonic()
    with pytest.raises(RunFailed, match=says):
        run(engine, partial(train_heads, wide=wide, steps_both=steps_both), tmp_path, strategy, options=options)
    assert time.monotonic() - began_s < SOON_S


def test_what_each_optimizer_chooses_is_told(tmp_path: Path) -> None:
    result = run("virtual", train_gan, tmp_path, "all-reduce", options={"codec": "auto"})
    told = [event.details for event in result.events if event.name == "tuned"][-1]
    assert {"optimizer_g.codec", "optimizer_d.codec"} <= told.keys()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("strategy", "options"), [("ps-ssp", {"staleness": 0}), ("ps-ssp", {}), ("ps-asp", {})])
def test_servers_take_each_optimizer_at_its_own_pace(engine: str, strategy: str, options: Any, tmp_path: Path) -> None:
    """Ranks step other optimizers in the same iteration; of the first, each takes as many steps in the end."""
    script = partial(train_heads, wide=False, steps_both=False)
    result = run(engine, script, tmp_path, strategy, options=options)
    assert result.iteration == 6


# --- what is refused ------------------------------------------------------------------------------------------------


def step_unprepared(worker: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 1))
    other = Adam(model[1].parameters())
    model, optimizer, data = worker.prepare(
        model, SGD(model[0].parameters(), lr=0.1), DataLoader(points(), batch_size=4)
    )
    for x, y in data:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        other.step()


@pytest.mark.parametrize(
    ("engine", "strategy"),
    [
        *((engine, strategy) for engine in ENGINES for strategy in ("all-reduce", "ps-asp")),
        *(("virtual", strategy) for strategy in ("ps-bsp", "ps-ssp", "gossip", "ad-psgd", "local-sgd", "fed-avg")),
    ],
)
def test_optimizer_that_was_not_prepared(engine: str, strategy: str, tmp_path: Path) -> None:
    options = {**TWO_CLIENTS, "optimizer": "kept"} if strategy == "fed-avg" else {}
    with pytest.raises(RunFailed, match=r"Adam steps the parameter '1\.weight' .* was not prepared itself"):
        run(engine, step_unprepared, tmp_path, strategy, options=options)


def train_gan_halfway(worker: Any) -> None:
    """The discriminator is not prepared."""
    generator, discriminator = nn.Linear(6, 6), nn.Linear(6, 1)
    other = Adam(discriminator.parameters())
    generator, optimizer, data = worker.prepare(
        generator, SGD(generator.parameters(), lr=0.1), DataLoader(points(), batch_size=4)
    )
    for x, _ in data:
        for parts, updater in (((x, generator(x).detach()), other), ((generator(x),), optimizer)):
            updater.zero_grad()
            sum(discriminator(part).mean() for part in parts).backward()
            updater.step()


@pytest.mark.parametrize(
    ("engine", "strategy"),
    [
        *(("virtual", strategy) for strategy in ("all-reduce", "ps-bsp", "ps-asp", "gossip", "local-sgd", "fed-avg")),
        pytest.param("local", "all-reduce", marks=pytest.mark.slow),
        pytest.param("local", "ps-asp", marks=pytest.mark.slow),
    ],
)
def test_model_that_was_not_prepared(engine: str, strategy: str, tmp_path: Path) -> None:
    options = {**TWO_CLIENTS, "optimizer": "kept"} if strategy == "fed-avg" else {}
    says = r"rank \d: Adam was not prepared and trains, batch after batch, .* shape \[1, 6\].*give prepare every model"
    with pytest.raises(RunFailed, match=says):
        run(engine, train_gan_halfway, tmp_path, strategy, options=options)


class Slow(torch.optim.Optimizer):
    """Made of another optimizer, which steps inside it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self._inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._inner.step()


def step_wrapped(worker: Any) -> nn.Module:
    model = nn.Linear(6, 1)
    optimizer = Slow(SGD(model.parameters(), lr=0.1))
    model, optimizer, data = worker.prepare(model, optimizer, DataLoader(points(), batch_size=4))
    probe = nn.Linear(6, 1)
    own = SGD(probe.parameters(), lr=0.1)
    own.differs_by_rank = True  # type: ignore[attr-defined]
    for x, y in data:
        attack = torch.zeros_like(x, requires_grad=True)
        adversary = SGD([attack], lr=0.1)
        for _ in range(2):
            (-F.mse_loss(model(x + attack), y)).backward(inputs=[attack])
            adversary.step()
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        F.mse_loss(probe(x), y).backward()
        own.step()
    SGD(model.parameters(), lr=0.1).step()  # after training
    return model  # type: ignore[no-any-return]


def test_optimizers_that_need_not_be_prepared(tmp_path: Path) -> None:
    result = run("local", step_wrapped, tmp_path, "all-reduce", max_steps=5)
    assert result.iteration == 5


def prepare_with(worker: Any, **changes: Any) -> None:
    first, second = nn.Linear(6, 1), nn.Linear(6, 1)
    everything = {
        "first": first,
        "second": second,
        "a": SGD(first.parameters(), lr=0.1),
        "b": SGD(second.parameters(), lr=0.1),
        "data": DataLoader(points(), batch_size=4),
    }
    everything |= {name: make(first, second) for name, make in changes.items()}
    worker.prepare(**everything)


def test_what_prepare_refuses(tmp_path: Path) -> None:
    for number, (changes, message) in enumerate(
        [
            ({"b": lambda first, _: Adam(first.parameters())}, "'a' and 'b' both hold the parameter 'first.weight'"),
            ({"second": lambda first, _: first}, "'first' and 'second' are the same model"),
            ({"data": lambda *_: nn.Linear(1, 1)}, "prepare was given no loader"),
            ({"noise": lambda *_: 3}, r"prepare\(noise=\.\.\.\) takes things with state_dict"),
            ({"b": lambda *_: SGD(nn.Linear(6, 1).parameters())}, r"prepare\(b=\.\.\.\): parameter 0 of the optimizer"),
            ({"values": lambda *_: nn.Linear(6, 1)}, "a model cannot be called 'values'"),
        ]
    ):
        with pytest.raises(RunFailed, match=message):
            run("virtual", partial(prepare_with, **changes), tmp_path / str(number), "all-reduce")


def prepare_by_place(worker: Any) -> None:
    model = nn.Linear(6, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    worker.prepare(model, optimizer, DataLoader(points(), batch_size=4), other=SGD(model.parameters(), lr=0.1))


def test_second_optimizer_beside_places(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"prepare\(other=\.\.\.\) is a second optimizer: give all by name"):
        run("virtual", prepare_by_place, tmp_path, "all-reduce")


@pytest.mark.parametrize("strategy", TAKE_ONE)
def test_second_optimizer_is_refused_where_servers_have_no_rule_for_it(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="has no rule for a second optimizer on the servers; prepare one"):
        run("virtual", train_gan, tmp_path, strategy)


def test_backup_workers_take_one_optimizer(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="prepare one optimizer, or leave backup_workers out"):
        run("virtual", train_gan, tmp_path, "ps-bsp", workers=3, options={"backup_workers": 1})
