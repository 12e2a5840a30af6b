"""The recipe of a GAN under every strategy: two models, each with its optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.errors import RunFailed
from tests.conformance.gan_script import train_gan
from tests.conformance.reference import train_alone
from tests.conformance.scripts import EXACT, assert_close
from tests.conformance.several_runs import (
    ENGINES,
    HAVE_CLIENTS,
    OWN_NAMES,
    TAKE_ONE,
    TWO_CLIENTS,
    in_double_precision,  # noqa: F401 - for every test
    launched,
    run,
)
from tests.covering import in_turns


@pytest.mark.parametrize(
    ("engine", "strategy"),
    in_turns(["ring", "all-reduce", "ps-bsp", "ps-bsp:servers=2"], tuple(ENGINES), are_quick=True),
)
def test_gan_equals_one_process(engine: str, strategy: str, tmp_path: Path) -> None:
    result = run(engine, train_gan, tmp_path, strategy, eval_every=5)
    assert result.iteration == 3 * (50 // 8)
    assert [evaluation.iteration for evaluation in result.evaluations] == [0, 5, 10, 15, 18]
    assert_close(result.model_state(), train_alone(train_gan, 2), EXACT)


def assert_learns(result: Any, *, falls_to: float = 0.95) -> None:
    """The discriminator tells what is real, and the generator's images change."""
    losses = [record.value for record in result.logged if record.name == "loss_d"]
    assert sum(losses[-8:]) < falls_to * sum(losses[:8])
    assert result.metrics["distance"] != result.evaluations[0].metrics["distance"]


SETTINGS_OF_OTHERS = ("d-psgd", "post-local", "slowmo", "fed-yogi", "fed-adagrad")
"""Of gossip, local-sgd and fed-adam."""


def each(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SETTINGS_OF_OTHERS else []) for name in names]


@pytest.mark.parametrize("strategy", each(name for name in OWN_NAMES if name not in HAVE_CLIENTS + TAKE_ONE))
def test_gan_trains_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    workers = 1 if strategy == "single" else 2
    result = run("virtual", partial(train_gan, epochs=8), tmp_path, strategy, workers, eval_every=7, checkpoint_every=9)
    assert_learns(result)
    assert {name.split(".")[0] for name in result.model_state()} == {"generator", "discriminator"}


@pytest.mark.parametrize("strategy", each(name for name in HAVE_CLIENTS if name not in ("fed-bn", "dp-fed-avg")))
def test_gan_trains_where_clients_take_turns(strategy: str, tmp_path: Path) -> None:
    options = TWO_CLIENTS | ({"private": "generator.3,discriminator.0"} if strategy == "fed-rep" else {})
    result = run("virtual", partial(train_gan, epochs=12), tmp_path, strategy, options=options, eval_every=4)
    assert_learns(result, falls_to=0.98)
    assert {name.split(".")[0] for name in result.model_state()} == {"generator", "discriminator"}
    assert result.iteration == 12


def test_gan_without_layers_that_clients_could_keep(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="private=norm: the model has no layer 'norm'; it has generator"):
        run("virtual", train_gan, tmp_path, "fed-bn", options=TWO_CLIENTS)


def test_gan_under_a_privacy_that_knows_one_optimizer(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="privacy is accounted for one optimizer, and several were prepared"):
        run("virtual", train_gan, tmp_path, "dp-fed-avg", options=TWO_CLIENTS)


@pytest.mark.parametrize("strategy", ["ps-ssp", "ps-asp"])
def test_gan_trains_with_real_servers(strategy: str, tmp_path: Path) -> None:
    result = run("local", partial(train_gan, epochs=8), tmp_path, strategy, workers=3, eval_every=7)
    assert_learns(result)
    first = [update.iteration for update in result.updates]
    assert len(first) == len(set(first)) == result.iteration == sum(1 for _ in result.steps)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp"])
def test_gan_on_ray(strategy: str, tmp_path: Path) -> None:
    result = paceline.run(partial(launched, train_gan), strategy=strategy, workers=2, out=tmp_path / "run")
    assert_close(result.model_state(), train_alone(train_gan, 2), EXACT)


@pytest.mark.parametrize(("engine", "strategy"), in_turns(["ps-bsp", "all-reduce"], tuple(ENGINES), are_quick=True))
def test_gan_resumes_in_mid_run(engine: str, strategy: str, tmp_path: Path) -> None:
    run(engine, train_gan, tmp_path / "begun", strategy, max_steps=8)
    run(engine, train_gan, tmp_path / "resumed", strategy, resume=tmp_path / "begun")
    run(engine, train_gan, tmp_path / "whole", strategy)
    resumed, whole = (
        Checkpoint.decode((tmp_path / name / FILE_NAME).read_bytes(), where="") for name in ("resumed", "whole")
    )
    assert whole.optimizers == ["optimizer_g", "optimizer_d"]
    assert int(whole.optimizer["optimizer_d.iteration"]) == 18
    for kind in ("model", "optimizer"):
        torch.testing.assert_close(getattr(resumed, kind), getattr(whole, kind), rtol=0, atol=0)
