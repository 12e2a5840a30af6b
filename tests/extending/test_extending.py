"""Strategies that know nothing but the public contracts: one file and one row of the registry each."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.reading import load
from paceline.errors import UsageError
from paceline.planner import StepWork, predict
from paceline.running.result import Result
from paceline.strategies import STRATEGIES, build, name_of, register
from paceline.strategies.base import Context, Strategy, Synchronizer
from paceline.strategies.replica import Replica
from paceline.strategies.traits import Traits
from paceline.topology import Ring
from tests.conformance import local_engine
from tests.covering import in_turns
from tests.extending import periodic, ring_gossip, sampled

WORKERS, BATCH_SIZE, NUM_SAMPLES = 4, 4, 96
LEARNING_RATE, MOMENTUM = 0.1, 0.5
ENTRIES = (ring_gossip.ENTRY, periodic.ENTRY, sampled.ENTRY)
OPTIONS: dict[str, dict[str, Any]] = {
    "ring-gossip": {"every": 2},
    "periodic": {"every": 3},
    "sampled": {"every": 2, "drawn": 8},
}
STEPS_OF_AN_ITERATION = {"ring-gossip": 1, "periodic": 3, "sampled": 4}
NAMES = [entry.name for entry in ENTRIES]
every_strategy = pytest.mark.parametrize("name", NAMES)

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def registered() -> Iterator[None]:
    for entry in ENTRIES:
        register(entry)
    yield
    for entry in ENTRIES:
        del STRATEGIES[entry.name]


ON_RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])
AWAY = [
    pytest.param(*case.values, marks=[*case.marks, pytest.mark.ray] if "ray" in case.values else case.marks)
    for case in in_turns(NAMES, ["processes", "ray"])
]
every_strategy_and_engine = pytest.mark.parametrize(
    ("engine", "name"), [*(("virtual", name) for name in NAMES), *AWAY], indirect=["engine"]
)


@pytest.fixture(params=["virtual", "processes", ON_RAY])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_here")
    return str(request.param)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SAMPLES, 10, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long(), torch.arange(NUM_SAMPLES))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()


def train(out: Path, *, epochs: int = 10_000, kill_at: int | None = None) -> None:
    """Every worker keeps the order of its samples, so that a naive loop can take the same."""
    worker = paceline.init()
    model = network()
    start = parameters(model)
    optimizer = SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    loader = DataLoader(data(), batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    worker.evaluation(lambda model: {"sum": float(parameters(model).sum()), "mean": float(model[1].running_mean.sum())})
    seen: list[list[int]] = []
    try:
        for _ in range(epochs):
            for x, y, which in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                seen.append(which.tolist())
    finally:
        torch.save((start, seen), out / f"{worker.rank}.seen")


def run(name: str, engine: str, out: Path, script: Callable[[Path], None] = train, **settings: Any) -> Result:
    out.mkdir(parents=True, exist_ok=True)
    settings |= {"strategy": name, "options": OPTIONS[name], "workers": WORKERS, "out": out / "run", "device": "cpu"}
    if engine == "processes":
        return local_engine.run(partial(script, out), **settings)
    more = {"cluster": "lab-1gbe"} if engine == "virtual" else {}
    return paceline.run(partial(script, out), engine=engine, **more, **settings)


def model_of(result: Result) -> Tensor:
    state = result.model_state()
    model = network()
    model.load_state_dict(state)
    return parameters(model)


# --- naive twins: plain loops over all workers' models ----------------------------------------------------------------


class Naive:
    """Workers that step one after the other; what they exchange is written out."""

    def __init__(self, out: Path) -> None:
        start, _ = torch.load(out / "0.seen")
        self.orders = [torch.load(out / f"{rank}.seen")[1] for rank in range(WORKERS)]
        self.models = [network() for _ in range(WORKERS)]
        for model in self.models:
            nn.utils.vector_to_parameters(start.float(), model.parameters())
        self.optimizers = [SGD(m.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM) for m in self.models]
        self.start = start

    def step(self, number: int) -> None:
        everything = data()
        for model, optimizer, order in zip(self.models, self.optimizers, self.orders, strict=True):
            x, y, _ = everything[order[number]]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    def rows(self) -> Tensor:
        return torch.stack([parameters(model) for model in self.models])

    def put(self, rows: Tensor) -> None:
        for model, row in zip(self.models, rows, strict=True):
            nn.utils.vector_to_parameters(row.float(), model.parameters())


def naive_ring_gossip(naive: Naive, num_steps: int) -> Tensor:
    for number in range(num_steps):
        naive.step(number)
        if (number + 1) % OPTIONS["ring-gossip"]["every"] == 0:
            naive.put(Ring().matrix(number + 1, WORKERS) @ naive.rows())
    return naive.rows().mean(0)


def naive_periodic(naive: Naive, num_rounds: int) -> Tensor:
    outer, velocity = naive.start, torch.zeros_like(naive.start)
    every = OPTIONS["periodic"]["every"]
    for number in range(num_rounds * every):
        naive.step(number)
        if (number + 1) % every == 0:
            change = outer - naive.rows().mean(0)
            velocity = 0.9 * velocity + change
            outer = outer - 0.7 * (change + 0.9 * velocity)
            naive.put(outer.expand(WORKERS, -1))
    return outer


def naive_sampled(naive: Naive, num_rounds: int) -> Tensor:
    strategy = sampled.Sampled(**OPTIONS["sampled"])
    model, number = naive.start, 0
    for round_ in range(num_rounds):
        senders = strategy.of_round(round_)
        total = torch.zeros_like(model)
        for turn in range(len(senders) // WORKERS):
            naive.put(model.expand(WORKERS, -1))
            for optimizer in naive.optimizers:
                optimizer.state.clear()
            for _ in range(strategy.every):
                naive.step(number)
                number += 1
            for row, sender in zip(naive.rows(), senders[turn * WORKERS : (turn + 1) * WORKERS], strict=True):
                total += (1 + sender) * (row - model)
        model = model + total / sum(1 + sender for sender in senders)
    return model


NAIVE = {"ring-gossip": naive_ring_gossip, "periodic": naive_periodic, "sampled": naive_sampled}


# --- what holds -------------------------------------------------------------------------------------------------------


@every_strategy
def test_a_run_is_its_naive_twin(name: str, engine: str, tmp_path: Path) -> None:
    """The budget holds, and the model that is evaluated and saved is the global one."""
    result = run(name, engine, tmp_path, max_steps=8, eval_every=4)
    assert result.iteration == 8
    assert [evaluation.iteration for evaluation in result.evaluations] == [0, 4, 8]
    expected = [NAIVE[name](Naive(tmp_path), iteration) for iteration in (0, 4, 8)]
    assert [e.metrics["sum"] for e in result.evaluations] == pytest.approx([float(e.sum()) for e in expected], rel=1e-5)
    torch.testing.assert_close(model_of(result), expected[-1], rtol=1e-5, atol=1e-6)


@every_strategy_and_engine
def test_a_resumed_run_is_an_uninterrupted_one(name: str, engine: str, tmp_path: Path) -> None:
    """With what each worker has for itself: parameters, momentum, statistics."""
    whole = run(name, engine, tmp_path / "whole", max_steps=8)
    run(name, engine, tmp_path / "first", max_steps=4)
    resumed = run(name, engine, tmp_path / "second", max_steps=8, resume=tmp_path / "first" / "run")
    torch.testing.assert_close(model_of(resumed), model_of(whole), rtol=0.0, atol=0.0)


@every_strategy
def test_another_strategy_goes_on_from_the_global_model(name: str, tmp_path: Path) -> None:
    first = run(name, "virtual", tmp_path / "first", max_steps=4)
    settings: dict[str, Any] = {"workers": WORKERS, "engine": "virtual", "cluster": "lab-1gbe", "device": "cpu"}
    script = partial(train, tmp_path)
    resumed = paceline.run(
        script, strategy="all-reduce", max_steps=5, resume=first.directory, out=tmp_path / "second", **settings
    )
    event = next(event for event in resumed.events if event.name == "carried_over")
    own = {
        "ring-gossip": {"parameters", "optimizer"},
        "periodic": {"parameters", "optimizer", "outer"},
        "sampled": set(),
    }
    assert {state.split(".")[0] for state in event.details} == own[name]
    assert set(event.details.values()) <= {"reset"}
    assert resumed.iteration == 5


@every_strategy_and_engine
def test_runs_stop_on_target_and_on_time(name: str, engine: str, tmp_path: Path) -> None:
    """Nobody hears everybody: all stop at the same iteration all the same."""
    by_target = run(name, engine, tmp_path / "target", eval_every=2, target="sum<=1e9", max_steps=50)
    assert by_target.iteration == 0
    max_time_s = 0.01 if engine == "virtual" else 1.0
    in_time = run(name, engine, tmp_path / "time", max_time_s=max_time_s)
    steps = [sum(step.worker == rank for step in in_time.steps) for rank in range(WORKERS)]
    assert max(steps) - min(steps) < STEPS_OF_AN_ITERATION[name]
    assert in_time.iteration > 0
    assert max(step.time_s for step in in_time.steps) < 10 * max_time_s


@every_strategy
def test_data_that_ends_in_a_round_ends_the_run(name: str, tmp_path: Path) -> None:
    result = run(name, "virtual", tmp_path, partial(train, epochs=3))
    expected_steps = 3 * NUM_SAMPLES // (WORKERS * BATCH_SIZE)
    assert len(result.steps) == WORKERS * expected_steps
    assert result.iteration == expected_steps // STEPS_OF_AN_ITERATION[name]


@pytest.mark.parametrize("cadence", [{}, {"eval_every": 1, "checkpoint_every": 1}], ids=["at the end", "every round"])
def test_a_round_that_ends_with_the_data_counts(
    cadence: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers end it as they leave: its model is evaluated and saved, also where the round before it was."""
    monkeypatch.setitem(OPTIONS, "periodic", {**OPTIONS["periodic"], "every": 4})
    script = partial(train, epochs=1)  # six steps
    first = run("periodic", "virtual", tmp_path / "first", script, **cadence)
    assert first.evaluations[-1].iteration == 2
    assert first.evaluations[-1].metrics["sum"] == pytest.approx(float(model_of(first).sum()))
    resumed = run("periodic", "virtual", tmp_path / "second", script, resume=tmp_path / "first" / "run")
    assert not resumed.steps
    torch.testing.assert_close(model_of(resumed), model_of(first), rtol=0.0, atol=0.0)


@every_strategy
def test_strategies_are_found_by_their_names(name: str) -> None:
    strategy = build(name, {"every": "5"})
    assert name_of(strategy) == name
    assert strategy.every == 5  # type: ignore[attr-defined]


@every_strategy
def test_plans_price_what_a_strategy_declares(name: str) -> None:
    """Fewer exchanges take less; none is free."""
    cluster, work = load("lab-1gbe"), StepWork(tensor_bytes=(4_000_000,), samples=32, step_s=0.01)
    rare, often, alone = (
        predict(cluster, strategy=strategy, options=options, workers=workers, work=work).step_s
        for strategy, options, workers in ((name, {"every": 10}, 4), (name, {"every": 1}, 4), ("single", {}, 1))
    )
    assert alone < rare < often


def test_a_plan_refuses_what_is_not_declared() -> None:
    class Silent(Strategy):
        @property
        def traits(self) -> Traits:
            return Traits(lock_step=True)

        def bind(self, context: Context, replica: Replica) -> Synchronizer:
            raise AssertionError("a plan runs nothing")

    work = StepWork(tensor_bytes=(4_000_000,), samples=32, step_s=0.01)
    with pytest.raises(UsageError, match="Silent"):
        predict(load("lab-1gbe"), strategy=Silent(), workers=2, work=work)


@pytest.mark.usefixtures("forked_programs")
def test_the_documented_example_runs(tmp_path: Path) -> None:
    """As it stands there, in fewer than 60 lines of code."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) < 60
    (tmp_path / "averaging.py").write_text(code)
    ended = subprocess.run(
        ["python", "averaging.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    (result,) = (Result(path) for path in (tmp_path / "runs").iterdir())
    assert result.metrics["loss"] < 0.5  # from about 8
