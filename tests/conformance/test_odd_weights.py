"""Weights that a script keeps, loads or changes, where the table of `test_odd_hunted.py` has no place for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim import SGD
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

import paceline
from paceline.engines.world import alone
from paceline.errors import RunFailed, UsageError
from paceline.training.extra_states import NAME, ExtraStates
from paceline.training.snapshot import move_on
from paceline.training.unchanged import unchanged
from paceline.training.worker import Worker
from tests.conformance import odd_weights, virtual_engine
from tests.conformance.odd_habits import own_loop
from tests.conformance.odd_hunted import Run, train
from tests.conformance.reference import train_alone
from tests.conformance.scripts import BATCH_SIZE, EXACT, assert_close, launched, perceptron, samples

FED = {"clients": 4, "fraction": 1.0, "optimizer": "kept"}
TWO_ROUNDS = {"diloco": {"every": 6}, "fed-avg": FED}


@pytest.mark.parametrize("strategy", TWO_ROUNDS)
def test_rounds_begin_with_weights_that_were_loaded_after_prepare(strategy: str, tmp_path: Path) -> None:
    states = []
    for place in ("before", "prepared"):
        script = partial(launched, partial(train, **{place: odd_weights.load_others}))
        result = virtual_engine.run(
            script, strategy=strategy, workers=2, out=tmp_path / place, options=TWO_ROUNDS[strategy]
        )
        states.append(result.model_state())
    assert_close(states[1], states[0], EXACT)


@pytest.mark.parametrize("strategy", TWO_ROUNDS)
def test_rounds_do_not_begin_with_weights_that_one_rank_has_loaded(strategy: str, tmp_path: Path) -> None:
    script = partial(launched, partial(train, prepared=odd_weights.load_own))
    with pytest.raises(RunFailed, match=r"parameter '1\.weight' is not the same on ranks 0 and 1.*on every rank"):
        virtual_engine.run(script, strategy=strategy, workers=2, out=tmp_path, options=TWO_ROUNDS[strategy])


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 4)).double()


def warm_up(run: Run, *, is_own: bool) -> None:
    x = samples().tensors[0]
    run.model(x[4 * run.worker.rank :][:4] if is_own else x[:4])


def test_clients_begin_with_the_first_ranks_statistics(tmp_path: Path) -> None:
    states = []
    for is_own in (True, False):
        script = partial(launched, partial(train, model=with_statistics, prepared=partial(warm_up, is_own=is_own)))
        result = virtual_engine.run(
            script, strategy="fed-avg", workers=2, out=tmp_path / str(is_own), options=TWO_ROUNDS["fed-avg"]
        )
        states.append(result.model_state())
    assert_close(states[0], states[1], EXACT)


@pytest.mark.parametrize("strategy", ["all-reduce", "gossip"])
def test_a_resumed_run_goes_on_from_the_checkpoint_whatever_is_loaded_after_prepare(
    strategy: str, tmp_path: Path
) -> None:
    script = partial(launched, partial(train, prepared=odd_weights.load_others))
    run = partial(virtual_engine.run, script, strategy=strategy, workers=2)
    whole = run(out=tmp_path / "whole", max_steps=18)
    run(out=tmp_path / "one", max_steps=14)
    resumed = run(out=tmp_path / "two", max_steps=18, resume=tmp_path / "one")
    assert_close(resumed.model_state(), whole.model_state(), EXACT)


def freeze(run: Run) -> None:
    run.model[1].requires_grad_(False)  # type: ignore[index]


def test_what_a_script_has_frozen_on_its_way_to_the_checkpoint_stays_so(tmp_path: Path) -> None:
    run = partial(
        virtual_engine.run, partial(launched, partial(train, passed=freeze)), strategy="all-reduce", workers=2
    )
    whole = run(out=tmp_path / "whole")
    first = run(out=tmp_path / "one", max_steps=14)
    resumed = run(out=tmp_path / "two", resume=tmp_path / "one")
    assert_close(resumed.model_state(), whole.model_state(), EXACT)
    assert torch.equal(first.model_state()["1.weight"], whole.model_state()["1.weight"])
    assert not torch.equal(first.model_state()["3.weight"], whole.model_state()["3.weight"])


@pytest.mark.parametrize("strategy", ["single", "all-reduce", "ps-bsp"])
def test_statistics_are_found_after_the_runs_end(strategy: str, tmp_path: Path) -> None:
    result = virtual_engine.run(
        partial(launched, odd_weights.normalised),
        strategy=strategy,
        workers=1 if strategy == "single" else 2,
        out=tmp_path,
        max_steps=10,
    )
    state = result.model_state()
    x = samples().tensors[0].flatten(1)
    torch.testing.assert_close(state["2.running_mean"], (x @ state["1.weight"].t() + state["1.bias"]).mean(0))


def test_a_loop_without_gradients_ends_with_the_run_and_the_script_goes_on(tmp_path: Path) -> None:
    ended: list[int] = []

    def script() -> None:
        model = perceptron()
        model, optimizer, loader = paceline.init().prepare(
            model, SGD(model.parameters(), lr=0.1), DataLoader(samples(), batch_size=BATCH_SIZE)
        )
        num_batches = 0
        with torch.no_grad():
            for _ in range(3):
                for _ in loader:
                    num_batches += 1
                    for parameter in model.parameters():
                        parameter.grad = torch.ones_like(parameter)
                    optimizer.step()
        ended.append(num_batches)

    virtual_engine.run(script, strategy="single", workers=1, out=tmp_path, max_steps=7)
    assert ended == [7]


class Counting(nn.Module):
    """Counts its batches in what is no tensor."""

    def __init__(self, *, is_plain: bool = True) -> None:
        super().__init__()
        self.net, self.count, self.is_plain = perceptron(), 0, is_plain

    def get_extra_state(self) -> Any:
        return {"count": self.count, "more": [] if self.is_plain else object()}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

    def forward(self, x: Tensor) -> Any:
        self.count += self.training
        return self.net(x)


def test_a_checkpoint_holds_what_modules_keep_besides_tensors(tmp_path: Path) -> None:
    counts: list[int] = []

    def script() -> None:
        model = train(paceline.init(), model=Counting)
        assert isinstance(model, Counting)
        counts.append(model.count)

    virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path / "one", max_steps=7)
    virtual_engine.run(
        script, strategy="all-reduce", workers=2, out=tmp_path / "two", max_steps=15, resume=tmp_path / "one"
    )
    assert counts == [7, 7, 15, 15]


def test_a_checkpoint_without_extra_states_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="no state for what modules give by get_extra_state; start a new run"):
        move_on([], {}, [], {NAME: ExtraStates(Counting())})


def test_what_a_checkpoint_could_not_hold_is_refused_at_once(tmp_path: Path) -> None:
    script = partial(launched, partial(train, model=partial(Counting, is_plain=False)))
    with pytest.raises(RunFailed, match=r"the extra state of the module .* make it of numbers, strings"):
        virtual_engine.run(script, strategy="single", workers=1, out=tmp_path)


class Growing(nn.Module):
    """A buffer has another shape after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.seen = torch.cat([self.seen, torch.ones(1)])
        return self.net(x)


def with_evaluation(**more: Any) -> Any:
    """The lengths that evaluations find of a growing model's buffer; zero of another's."""

    def script() -> None:
        worker = paceline.init()
        worker.evaluation(lambda model: {"length": float(len(getattr(model, "seen", ())))})
        train(worker, **more)

    return script


def test_models_are_judged_as_they_were_when_their_buffers_grow(tmp_path: Path) -> None:
    result = virtual_engine.run(
        with_evaluation(model=Growing), strategy="ps-asp", workers=2, out=tmp_path, eval_every="4", max_steps=24
    )
    found = [evaluation.metrics["length"] for evaluation in result.evaluations]
    assert len(found) >= 6
    assert found == sorted(set(found))


def prune_one(run: Run) -> None:
    if run.number == 5:
        prune.l1_unstructured(run.model[1], "weight", amount=0.4)  # type: ignore[index,no-untyped-call]


def test_models_that_were_kept_before_pruning_are_left_out(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"iteration \d+ is not evaluated.*'1\.weight' is new, gone.*--keep-best"):
        result = virtual_engine.run(
            with_evaluation(stepped=prune_one),
            strategy="ps-asp",
            workers=2,
            out=tmp_path,
            eval_every="3",
            max_steps=24,
        )
    assert result.model_state().keys() >= {"1.weight_orig", "1.weight_mask"}


def test_a_run_without_files_takes_any_extra_state() -> None:
    """A script that nobody launched: it has no checkpoint that could not hold it."""
    world = alone(seed=0)
    worker = Worker(world)
    model = train(worker, model=partial(Counting, is_plain=False))
    for finish in world.at_end:
        finish()
    world.release()
    assert isinstance(model, Counting)
    assert model.count == 48


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-asp"])
def test_an_evaluation_keeps_one_copy_of_the_model(strategy: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Also where the model that is judged was kept earlier."""
    num_kept, most = 0, 0

    @contextmanager
    def counted(model: nn.Module) -> Iterator[None]:
        nonlocal num_kept, most
        num_kept += 1
        most = max(most, num_kept)
        with unchanged(model):
            yield
        num_kept -= 1

    monkeypatch.setattr("paceline.training.evaluation.unchanged", counted)
    monkeypatch.setattr("paceline.training.judging.unchanged", counted)
    script = partial(launched, partial(odd_weights.evaluated, evaluate=odd_weights.round_weights))
    result = virtual_engine.run(script, strategy=strategy, workers=2, out=tmp_path, eval_every="4")
    assert len(result.evaluations) > 3
    assert most == 1


def test_passes_without_gradients_end_at_once_when_the_run_has_ended(tmp_path: Path) -> None:
    """But for the first one from a place of the script, and for what forgets statistics first."""
    counts: list[list[int]] = []

    def script() -> None:
        own: list[int] = []

        def judged(run: Run) -> None:
            with torch.no_grad():
                own.append(sum(1 for _ in run.loader))

        def passed(run: Run) -> None:
            judged(run)
            update_bn(run.loader, run.model)
            own.append(int(run.model[1].num_batches_tracked))  # type: ignore[index,arg-type]

        train(paceline.init(), model=with_statistics, passed=passed, num_epochs=4)
        counts.append(own)

    with pytest.warns(UserWarning, match=r"the run has ended, .*such passes are empty from here on.*worker\.is_over"):
        virtual_engine.run(script, strategy="single", workers=1, out=tmp_path, max_steps=5)
    assert counts == [[24, 24, 0, 24, 0, 24, 0, 24]]


def test_after_the_end_several_passes_from_one_place_have_batches(tmp_path: Path) -> None:
    """Until an epoch has come between, as where a script goes through its remaining ones."""
    counts: list[int] = []

    def script() -> None:
        def passed(run: Run) -> None:
            with torch.no_grad():
                counts.extend(sum(1 for _ in run.loader) for _ in range(2))

        train(paceline.init(), passed=passed, num_epochs=3)

    with pytest.warns(UserWarning, match="the run has ended"):
        virtual_engine.run(script, strategy="single", workers=1, out=tmp_path, max_steps=5)
    assert counts == [24, 24, 0, 0, 0, 0]


@pytest.mark.parametrize("own", [False, True])
def test_weights_may_be_changed_for_a_pass_alike(own: bool, tmp_path: Path) -> None:
    def script(worker: Any) -> nn.Module:
        def noisy(model: nn.Module, optimizer: Any, batch: Any) -> None:
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            generator = torch.Generator().manual_seed(worker.rank if own else 7)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.01 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            optimizer.zero_grad()
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            with torch.no_grad():
                for parameter, before in zip(model.parameters(), kept, strict=True):
                    parameter.copy_(before)
            optimizer.step()

        return own_loop(worker, step=noisy)

    run = partial(virtual_engine.run, partial(launched, script), strategy="all-reduce", workers=2, out=tmp_path)
    if own:
        with pytest.raises(RunFailed, match=r"in a backward pass parameter '1\.weight' was not the same on ranks 0"):
            run()
        return
    assert_close(run().model_state(), train_alone(script, 2), EXACT)


@pytest.mark.parametrize(
    ("strategy", "options", "is_global"),
    [
        ("local-sgd", {"every": 3}, True),  # 12 steps end with a round,
        ("local-sgd", {"every": 5}, False),  # and these in one
        ("diloco", {"every": 3}, True),
        ("diloco", {"every": 3, "alpha": 0.5}, False),
        ("gossip", {}, False),
        ("noloco", {"every": 3}, False),
    ],
)
def test_what_the_model_is_after_the_loop(
    strategy: str, options: dict[str, Any], is_global: bool, tmp_path: Path
) -> None:
    models: dict[int, dict[str, Tensor]] = {}

    def script() -> None:
        worker = paceline.init()
        model = train(worker, num_epochs=2)
        models[worker.rank] = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    result = virtual_engine.run(script, strategy=strategy, workers=4, options=options, out=tmp_path)
    found = result.model_state()
    if is_global:
        for model in models.values():
            assert_close(model, found, EXACT)
        return
    assert all(not torch.equal(model["1.weight"], found["1.weight"]) for model in models.values())
    if strategy in ("gossip", "noloco"):
        mean = {name: torch.stack([model[name] for model in models.values()]).mean(0) for name in found}
        assert_close(mean, found, EXACT)
