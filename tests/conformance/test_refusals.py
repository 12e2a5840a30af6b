"""What a strategy cannot honour it refuses with an error that names the culprit; nothing differs silently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD

from paceline.errors import RunFailed
from paceline.running.result import Result
from paceline.training.worker import Worker
from tests.conformance.rows import ROWS, Row, every_row, loader_of, network, prepared, problem, step

ROW = {row.name: row for row in ROWS}
SERVERS, PEERS, ASYNCHRONOUS = ROW["ps-bsp"], ROW["all-reduce"], ROW["ps-asp"]


def train_with(change: Callable[[nn.Module, Any], object]) -> Callable[[Worker], None]:
    """A script that does something to its prepared model or optimizer before the second step."""

    def script(worker: Worker) -> None:
        model = network()
        model[0].bias.requires_grad_(False)
        optimizer = SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = worker.prepare(model, optimizer, loader_of(problem()))
        for number, (x, y, _) in enumerate(loader):
            if number == 1:
                change(model, optimizer)
            step(worker, model, optimizer, x, y)

    return script


def unfreeze(worker: Worker, out: Path) -> None:
    train_with(lambda model, optimizer: model.get_parameter("0.bias").requires_grad_(True))(worker)


def add_group(worker: Worker, out: Path) -> None:
    def add(model: nn.Module, optimizer: Any) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})

    train_with(add)(worker)


def add_hook(worker: Worker, out: Path) -> None:
    train_with(lambda model, optimizer: optimizer.register_step_post_hook(lambda *_: None))(worker)


def change_in_place(worker: Worker, out: Path) -> None:
    def change(model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            model.get_parameter("2.weight").clamp_(-0.01, 0.01)

    train_with(change)(worker)


def change_dtype(worker: Worker, out: Path) -> None:
    train_with(lambda model, optimizer: model.double().float())(worker)


@pytest.mark.parametrize(
    ("row", "script", "message"),
    [
        (PEERS, unfreeze, "the optimizer trains parameter '0.bias', .* which it did not when it was prepared"),
        (SERVERS, unfreeze, "the optimizer trains parameter '0.bias', .* which it did not when it was prepared"),
        (PEERS, add_group, "the optimizer trains parameter that is not of the model, .* add, replace and unfreeze"),
        (SERVERS, add_hook, "SGD has step hooks, which servers cannot call"),
        (SERVERS, change_in_place, "step 2: the script changed parameters in place on rank"),
        (ASYNCHRONOUS, change_in_place, "step 2: the script changed parameters in place on rank"),
        (SERVERS, change_dtype, "parameter '0.weight' was moved or converted meanwhile: .* convert it before prepare"),
        (PEERS, change_dtype, r"parameter '\d.\w+' was moved or converted meanwhile: .* convert it before prepare"),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", "")),
)
def test_change_after_prepare(row: Row, script: Callable[..., None], message: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=message):
        row.run(script, tmp_path)


def clip_late(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for number, (x, y, _) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if number == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def test_gradients_changed_only_from_a_later_step_on(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"step 3: the script changed gradients .* use --option combine=always"):
        SERVERS.run(clip_late, tmp_path / "auto")
    SERVERS.run(clip_late, tmp_path / "always", options={"combine": "always"})


def clip_always(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for x, y, _ in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def test_backup_workers_have_no_mean_gradient_to_change(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="under ps-bsp with backup_workers or --elastic there is no mean gradient"):
        ROW["ps-bsp-backup"].run(clip_always, tmp_path)


def swap_weights(worker: Worker, out: Path) -> None:
    """Evaluates an average of weights in place of the model's own, as scripts do, without putting them back."""
    model, optimizer, loader = prepared(worker)

    @worker.evaluation
    def evaluate(model: nn.Module) -> dict[str, float]:
        for parameter in model.parameters():
            parameter.mul_(0.5)
        return {"zero": 0.0}

    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)


def test_evaluation_may_change_the_weights_that_servers_own(tmp_path: Path) -> None:
    swapped = SERVERS.run(swap_weights, tmp_path / "swapped", eval_every=3, max_steps=10)
    plain = SERVERS.run(swap_weights, tmp_path / "plain", max_steps=10)
    assert len(swapped.evaluations) == 5
    torch.testing.assert_close(swapped.model_state(), plain.model_state(), rtol=0, atol=0)


def search_lines(worker: Worker, out: Path) -> None:
    model = network()
    model, optimizer, loader = worker.prepare(model, LBFGS(model.parameters(), max_iter=3), loader_of(problem()))
    for x, y, _ in loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        worker.log(loss=optimizer.step(closure))


@every_row
def test_servers_run_no_optimizers_that_evaluate_several_times_a_step(row: Row, tmp_path: Path) -> None:
    if row.is_local or not row.num_servers:
        steps_an_iteration = row.workers * row.steps_an_iteration if row.updates_are_joint else 1
        iteration = row.run(search_lines, tmp_path).iteration
        assert iteration == 24 // steps_an_iteration or row.rounds_vary
    else:
        with pytest.raises(RunFailed, match="LBFGS evaluates the model itself, perhaps several times a step"):
            row.run(search_lines, tmp_path)


def build_other_model(worker: Worker, out: Path) -> None:
    model = nn.Linear(10, 4 + worker.rank)
    worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))


@pytest.mark.parametrize("row", [PEERS, SERVERS], ids=lambda row: row.name)
def test_ranks_with_other_models(row: Row, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"parameter 0 differs: rank 0 has weight of shape \[4, 10\].*rank 1 has"):
        row.run(build_other_model, tmp_path)


def prepare_twice(worker: Worker, out: Path) -> None:
    prepared(worker)
    prepared(worker)


def evaluate_twice(worker: Worker, out: Path) -> None:
    worker.evaluation(lambda model: {})
    worker.evaluation(lambda model: {})


def evaluate_late(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)
    worker.evaluation(lambda model: {})


def return_list(worker: Worker, out: Path) -> None:
    _, _, loader = prepared(worker)
    worker.evaluation(lambda model: [1.0])  # type: ignore[arg-type,return-value]
    next(iter(loader))


def return_text(worker: Worker, out: Path) -> None:
    _, _, loader = prepared(worker)
    worker.evaluation(lambda model: {"accuracy": "high"})  # type: ignore[dict-item]
    next(iter(loader))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (prepare_twice, "prepare was called twice"),
        (evaluate_twice, "a second evaluation was registered"),
        (evaluate_late, "the evaluation came after the first batch"),
        (return_list, "the evaluation returned list; it must return a dict of numbers"),
        (return_text, "the evaluation's 'accuracy' is str; it must be a number"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_misuse_of_the_worker(script: Callable[..., None], message: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=message):
        PEERS.run(script, tmp_path, eval_every=None if script is evaluate_late else 5)


def train_without_evaluation(worker: Worker, out: Path) -> None:
    model, optimizer, loader = prepared(worker)
    for x, y, _ in loader:
        step(worker, model, optimizer, x, y)


@pytest.mark.parametrize(("asked", "settings"), [("--target", {"target": "a=1"}), ("--eval-every", {"eval_every": 5})])
def test_evaluations_asked_of_a_script_that_has_none(asked: str, settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=f"{asked} needs an evaluation, and the script registers none"):
        PEERS.run(train_without_evaluation, tmp_path, **settings)
    assert Result(tmp_path).steps == []
