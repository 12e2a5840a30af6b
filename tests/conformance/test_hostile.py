"""Runs with hostile workers and robust aggregators equal a plain loop over all workers' gradients."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import pieces
from paceline.aggregate import Aggregator, Contribution
from paceline.attacks import DataAttack, SentAttack, parse
from paceline.errors import UsageError
from paceline.running.result import Result
from paceline.strategies import build
from paceline.training.worker import Worker
from tests.conformance import local_engine, virtual_engine
from tests.conformance.rows import keep, kept, launched, loader_of, network, problem, steps_of

WORKERS, STEPS, LR = 5, 6, 0.1


def train(worker: Worker, out: Path) -> None:
    """Keeps the order in which this worker saw its samples."""
    model = network()
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=LR), two_of(loader_of(problem())))
    if worker.rank == 0:
        keep(out, "start", dict(model.state_dict()))
    seen = []
    for _ in range(2):
        for x, y in loader:
            seen.append(x[:, -1].long())
            loss = F.cross_entropy(model(x[:, :-1]), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            keep(out, f"seen-{worker.rank}", torch.stack(seen))


def two_of(loader: Any) -> DataLoader[Any]:
    """Batches of (inputs, labels), with each sample's number as its last input."""
    x, y, numbers = loader.dataset.tensors
    numbered = torch.cat([x, numbers[:, None].float()], dim=1)
    return DataLoader(TensorDataset(numbered, y), batch_size=2, shuffle=True, drop_last=True)


def run(engine: ModuleType, out: Path, strategy: str, attacks: tuple[str, ...] = (), **options: Any) -> Result:
    found: Result = engine.run(
        partial(launched, train, out),
        strategy=strategy,
        options=options,
        workers=WORKERS,
        out=out,
        max_steps=STEPS,
        attacks=attacks,
    )
    return found


def reference(out: Path, aggregate: str, attacks: tuple[str, ...], every: int = 1) -> nn.Module:
    """What a loop over the same batches makes of the same start."""
    aggregator = pieces.read(Aggregator, aggregate)  # type: ignore[type-abstract]
    model = network()
    model.load_state_dict(kept(out, "start"))
    x, y, _ = problem().tensors
    orders = [kept(out, f"seen-{rank}") for rank in range(WORKERS)]
    for turn in range(STEPS):
        start = nn.utils.parameters_to_vector(model.parameters()).detach()
        honest_rows = []
        for rank in range(WORKERS):
            nn.utils.vector_to_parameters(start.clone(), model.parameters())
            for numbers in orders[rank][turn * every : (turn + 1) * every]:
                labels = y[numbers]
                for attack in parse(attacks):
                    if isinstance(attack, DataAttack) and attack.is_hostile(rank, size=WORKERS):
                        labels = attack.poisoned(x[numbers], labels)[1]
                model.zero_grad()
                F.cross_entropy(model(x[numbers]), labels).backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter -= LR * parameter.grad
            honest_rows.append((start - nn.utils.parameters_to_vector(model.parameters()).detach()).double())
        rows = attacked(honest_rows, attacks)
        given = [Contribution(rank, 1.0, "gradient", [row.float()]) for rank, row in enumerate(rows)]
        (step,) = aggregator.aggregate(given, [torch.zeros_like(start)])
        nn.utils.vector_to_parameters(start - step, model.parameters())
    return model


def attacked(rows: list[Tensor], attacks: tuple[str, ...]) -> list[Tensor]:
    for attack in parse(attacks):
        if isinstance(attack, SentAttack):
            is_hostile = [attack.is_hostile(rank, size=WORKERS) for rank in range(WORKERS)]
            honest = torch.stack([row for row, hostile in zip(rows, is_hostile, strict=True) if not hostile])
            send = partial(attack.sent, honest=honest, size=WORKERS, generator=torch.Generator())
            rows = [send(row) if hostile else row for row, hostile in zip(rows, is_hostile, strict=True)]
    return rows


CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "mean under sign flip": ("all-reduce", {}, ("sign-flip",)),
    "krum under inner products": ("all-reduce", {"aggregate": "krum:byzantine=2"}, ("ipm:workers=2",)),
    "median under alie": ("all-reduce", {"aggregate": "median"}, ("alie:workers=2",)),
    "mixing on a server": (
        "ps-bsp",
        {"aggregate": "nearest:byzantine=1:then=trimmed-mean:byzantine=1"},
        ("ipm",),
    ),
    "median on two servers": ("ps-bsp", {"aggregate": "median", "servers": 2}, ("min-sum", "min-max")),
    "krum on a server": ("ps-bsp", {"aggregate": "krum:byzantine=1"}, ()),
    "rounds": ("local-sgd", {"every": 2, "aggregate": "geometric-median:nu=0.001"}, ("model-replacement:boost=9",)),
    "labels": ("ps-bsp", {}, ("label-flip:workers=2:classes=4", "model-replacement:workers=2")),
}


IN_PROCESSES = ("krum under inner products", "mixing on a server", "rounds")
"""The others are left to `make test-slow` there."""


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        *(pytest.param(case, virtual_engine, id=f"{case}-virtual") for case in CASES),
        *(
            pytest.param(
                case,
                local_engine,
                id=f"{case}-processes",
                marks=() if case in IN_PROCESSES else pytest.mark.slow,
            )
            for case in CASES
        ),
    ],
)
def test_a_run_is_a_loop_over_all_workers(case: str, engine: ModuleType, tmp_path: Path) -> None:
    strategy, options, attacks = CASES[case]
    result = run(engine, tmp_path, strategy, attacks, **options)
    expected = reference(tmp_path, options.get("aggregate", "mean"), attacks, every=options.get("every", 1))
    torch.testing.assert_close(result.model_state(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    told = [event.details for event in result.events if event.name == "attack"]
    assert told == ([{"attacks": list(attacks), "hostile workers know": "all"}] if attacks else [])


def test_who_answers_alone_knows_only_his_own(tmp_path: Path) -> None:
    """Asynchronous workers never meet: a hostile one takes its own gradient for the honest mean."""
    result = run(virtual_engine, tmp_path, "ps-asp", ("sign-flip",))
    (told,) = [event.details for event in result.events if event.name == "attack"]
    assert told["hostile workers know"] == "own"
    with pytest.raises(Exception, match="has to know what 2 honest workers send, and under this strategy"):
        run(virtual_engine, tmp_path / "alie", "ps-asp", ("alie",))


@pytest.mark.parametrize("strategy", ["gossip", "diloco:every=2:fragments=2", "ad-psgd:topology=chain"])
def test_every_strategy_runs_under_attack(strategy: str, tmp_path: Path) -> None:
    """And comes out alike each time, and otherwise than without."""
    states = [
        run(virtual_engine, tmp_path / name, strategy, attacks).model_state()
        for name, attacks in (("once", ("gauss",)), ("again", ("gauss",)), ("clean", ()))
    ]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name])
        assert not torch.equal(tensor, states[2][name])


def test_what_fools_gold_remembers_is_in_checkpoints(tmp_path: Path) -> None:
    whole = run(virtual_engine, tmp_path / "whole", "all-reduce", ("ipm:workers=2",), aggregate="fools-gold")
    trained = partial(virtual_engine.run, strategy="all-reduce", workers=WORKERS, options={"aggregate": "fools-gold"})
    settings: dict[str, Any] = {"attacks": ("ipm:workers=2",)}
    halves = tmp_path / "halves"
    trained(partial(launched, train, halves), out=halves, max_steps=STEPS // 2, **settings)
    resumed = trained(partial(launched, train, halves), out=halves, max_steps=STEPS, resume=halves, **settings)
    torch.testing.assert_close(resumed.model_state(), whole.model_state(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("ps-asp:aggregate=median", "compares the gradients of an update, and under ps-asp each gradient is one"),
        ("ps-bsp:servers=2:aggregate=geometric-median", "compares whole gradients, of which each of 2 servers has a"),
        ("ps-bsp:combine=always:aggregate=median", "combine=always averages gradients before aggregate=median"),
        ("ps-bsp:aggregate=fools-gold", "remembers what each worker has sent, which servers do not keep"),
        ("all-reduce:codec=int8:aggregate=median", "has a way of its own; leave out codec and algorithm"),
        ("local-sgd:reject=validation", "unknown option for local-sgd 'reject'"),
        ("ps-bsp:reject=validation", "unknown option for ps-bsp 'reject'"),
        ("ring:aggregate=median", "has a way of its own; leave out codec and algorithm"),
        ("diloco:fragments=2:aggregate=krum:aggregate.byzantine=1", "compares whole changes; use fragments=1, not 2"),
    ],
)
def test_what_has_no_meaning_is_refused(strategy: str, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        build(strategy)


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp", "local-sgd"])
def test_too_few_workers_are_refused(strategy: str) -> None:
    wanted: Callable[..., Any] = build(strategy, {"aggregate": "krum", "aggregate.byzantine": "1"}).check
    wanted(num_workers=4)
    with pytest.raises(UsageError, match="aggregate=krum:byzantine=1: byzantine=1 needs 4 contributions, and"):
        wanted(num_workers=3)


def test_who_trains_alone_cannot_be_hostile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--attack gauss has no effect under this strategy, whose workers cannot be"):
        paceline.run(
            partial(launched, train, tmp_path), strategy="single", workers=1, attack="gauss", out=tmp_path / "out"
        )


def look_at_labels(worker: Worker, out: Path) -> None:
    """Keeps, turn by turn, whether labels are as they are in the data."""
    model = network()
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=LR), two_of(loader_of(problem())))
    truth, turns = problem().tensors[1], []
    for _ in range(20):
        seen = []
        for x, y in loader:
            seen += [(y == truth[x[:, -1].long()]).all().item(), (y == 3 - truth[x[:, -1].long()]).all().item()]
            optimizer.zero_grad()
            F.cross_entropy(model(x[:, :-1]), y).backward()
            optimizer.step()
        if seen:
            turns.append((all(seen[::2]), all(seen[1::2])))
        keep(out, f"turns-{worker.rank}", turns)


@pytest.mark.parametrize("engine", [local_engine, virtual_engine], ids=["processes", "virtual"])
def test_hostile_clients_train_on_poisoned_data_whoever_plays_them(engine: ModuleType, tmp_path: Path) -> None:
    result = engine.run(
        partial(launched, look_at_labels, tmp_path),
        strategy="fed-avg",
        options={"clients": 4, "fraction": 1.0, "aggregate": "median"},
        workers=2,
        out=tmp_path,
        max_steps=3,
        attacks=("label-flip:classes=4", "sign-flip:workers=2"),
    )
    assert result.iteration == 3
    turns = [turn for rank in range(2) for turn in kept(tmp_path, f"turns-{rank}")]
    assert turns.count((False, True)) == 3, "one of four clients, in each of three rounds"
    assert turns.count((True, False)) == 9


def judge_with(evaluation: Callable[[nn.Module], dict[str, float]] | None, worker: Worker, out: Path) -> None:
    """Clients hold classes that all have alike, and running statistics, which are judged with the rest."""
    body = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer, loader = worker.prepare(body, SGD(body.parameters(), lr=LR), two_of(loader_of(problem())))
    if evaluation is not None:
        worker.evaluation(evaluation)
    for _ in range(20):
        for x, y in loader:
            worker.log(wall_s=time.perf_counter())
            optimizer.zero_grad()
            F.cross_entropy(model(x[:, :-1]), y).backward()
            optimizer.step()


def loss_of_all(model: nn.Module) -> dict[str, float]:
    x, y, _ = problem().tensors
    return {"loss": float(F.cross_entropy(model(x), y))}


@pytest.mark.parametrize("engine", [local_engine, virtual_engine], ids=["processes", "virtual"])
@pytest.mark.parametrize("attacks", [(), ("sign-flip",), ("gauss:sigma=3",)])
def test_a_script_s_own_evaluation_says_who_is_left_out(
    attacks: tuple[str, ...], engine: ModuleType, tmp_path: Path
) -> None:
    result = engine.run(
        partial(launched, partial(judge_with, loss_of_all), tmp_path),
        strategy="fed-avg",
        options={"clients": 4, "fraction": 1.0, "reject": "validation:margin=0.02"},
        workers=2,
        out=tmp_path,
        max_steps=3,
        attacks=attacks,
    )
    told = [event.details for event in result.events if event.name == "rejected"]
    assert [(each["round"], [*each["with"]]) for each in told] == [(n, ["client 3"]) for n in (1, 2, 3) if attacks]


def loss_slowly(model: nn.Module) -> dict[str, float]:
    time.sleep(0.1)
    return loss_of_all(model)


def test_judging_is_no_training(tmp_path: Path) -> None:
    """Each round is judged for 0.5 s, on one worker, while the other one waits: two of three before the last batch."""
    result = local_engine.run(
        partial(launched, partial(judge_with, loss_slowly), tmp_path),
        strategy="fed-avg",
        options={"clients": 4, "fraction": 1.0, "reject": "validation"},
        workers=2,
        out=tmp_path,
        max_steps=3,
    )
    for worker in range(2):
        steps = steps_of(result, worker)
        times = [step.compute_s + step.communication_s + step.waiting_s for step in steps]
        assert sum(times) == pytest.approx(steps[-1].time_s, abs=1e-3)
        marks = [mark for mark in result.logged if mark.worker == worker]
        whole_s, training_s = marks[-1].value - marks[0].value, marks[-1].time_s - marks[0].time_s
        assert whole_s - training_s >= 0.99, "1 s of judging is no part of it"


@pytest.mark.parametrize(
    ("evaluation", "why"),
    [
        (None, "judges updates by the script's evaluation, and the script registers none"),
        (loss_of_all, "reject=validation:metric=losses: unknown metric 'losses'"),
    ],
)
def test_nobody_is_judged_by_what_is_not_there(evaluation: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=why):
        virtual_engine.run(
            partial(launched, partial(judge_with, evaluation), tmp_path),
            strategy="fed-avg",
            options={"clients": 4, "fraction": 1.0, "reject": "validation:metric=losses"},
            workers=2,
            out=tmp_path,
            max_steps=3,
        )


def test_an_attack_needs_an_honest_worker(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leaves none of 2 worker"):
        paceline.run(partial(launched, train, tmp_path), workers=2, attack="gauss:workers=2", out=tmp_path / "out")
