"""Federated runs through the script's own loop: what they are beside gradient descent, and what clients keep."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad
from torch.utils.data import DataLoader

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.errors import RunFailed
from paceline.privacy import Central
from paceline.running.result import Result
from paceline.training.worker import Worker
from tests.conformance import local_engine, virtual_engine
from tests.conformance.rows import flat, keep, kept, launched, loader_of, network, problem, step, steps_of
from tests.conformance.test_resume import assert_same

both_engines = pytest.mark.parametrize("engine", [local_engine, virtual_engine], ids=["local", "virtual"])


def run(
    engine: ModuleType, script: Any, out: Path, *, strategy: str = "fed-avg", workers: int = 2, **settings: Any
) -> Result:
    result: Result = engine.run(partial(launched, script, out), strategy=strategy, workers=workers, out=out, **settings)
    return result


def in_whole_batches(worker: Worker, out: Path, *, num_passes: int) -> None:
    """Every client's step is of all its samples."""
    data = problem()
    model = network().double()
    loader = DataLoader(data, batch_size=len(data))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    for _ in range(num_passes):
        for x, y, _ in loader:
            step(worker, model, optimizer, x.double(), y)


@both_engines
@pytest.mark.parametrize("partition", ["linear", "shards", "dirichlet"])
def test_whole_batches_of_all_clients_are_gradient_descent(engine: ModuleType, partition: str, tmp_path: Path) -> None:
    """One epoch, weights by samples, the mean loss: whoever has which samples."""
    options = {"clients": 6, "fraction": 1.0, "partition": partition}
    result = run(engine, partial(in_whole_batches, num_passes=12), tmp_path, options=options)
    assert result.iteration == 4
    torch.manual_seed(0)
    model = network().double()
    optimizer = SGD(model.parameters(), lr=0.1)
    x, y, _ = problem().tensors
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
    state = result.model_state()
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-6, atol=1e-6)


class Observed(nn.Module):
    """A shared layer, batch norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(F.relu(self.norm(self.body(x))))
        return found


def train(worker: Worker, out: Path, *, num_passes: int = 24, fails_at: int | None = None, lr: float = 0.1) -> None:
    model = Observed()
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=lr, momentum=0.5), loader_of(problem()))
    worker.evaluation(lambda model: {"sum": float(flat(model).double().sum())})
    num_steps = 0
    for _ in range(num_passes):
        for x, y, _ in loader:
            step(worker, model, optimizer, x + 0.1 * torch.randn_like(x), y)
            num_steps += 1
            if num_steps == fails_at:
                raise RuntimeError("scripted failure")


CLIENTS = {"clients": 6, "fraction": 0.5, "partition": "shards"}
METHODS: dict[str, dict[str, Any]] = {
    "fed-avg": {"optimizer": "kept"},
    "fed-avg:aggregate=fools-gold": {},
    "fed-prox": {"correction.mu": "1"},
    "fed-yogi": {},
    "scaffold": {},
    "fed-nova": {},
    "fed-bn": {},
    "fed-rep": {},
    "fed-buff": {"sampler.at_once": "0.67"},
}


@pytest.mark.parametrize(
    ("engine", "strategy"),
    [
        *((local_engine, name) for name in ("scaffold", "fed-rep")),
        *((virtual_engine, name) for name in METHODS),
    ],
)
def test_a_run_goes_on_bit_for_bit_with_what_clients_keep(engine: ModuleType, strategy: str, tmp_path: Path) -> None:
    options = {**CLIENTS, **METHODS[strategy]}
    settings = {"strategy": strategy, "options": options, "max_steps": 8}
    run(engine, train, tmp_path / "whole", **settings)
    fails = partial(train, fails_at=80 if strategy == "fed-rep" else 40)
    with pytest.raises(RunFailed, match="scripted failure"):
        run(engine, fails, tmp_path / "begun", checkpoint_every=3, **settings)
    begun = Checkpoint.decode((tmp_path / "begun" / FILE_NAME).read_bytes(), where="")
    assert begun.iteration in (3, 6)
    run(engine, train, tmp_path / "resumed", resume=tmp_path / "begun", **settings)
    found, wanted = (
        Checkpoint.decode((tmp_path / name / FILE_NAME).read_bytes(), where="") for name in ("resumed", "whole")
    )
    assert_same(found, wanted)


@pytest.mark.parametrize("strategy", METHODS)
def test_the_number_of_workers_changes_nothing_but_rounding(strategy: str, tmp_path: Path) -> None:
    """Nor who plays whom: random numbers, data and buffers are of the client and the round. Private layers of the
    evaluated model are those that workers have in place, and so left out."""
    settings = {"strategy": strategy, "options": {**CLIENTS, **METHODS[strategy]}, "max_steps": 5}
    found = []
    for workers in (1, 2, 4):
        state = run(virtual_engine, train, tmp_path / str(workers), workers=workers, **settings).model_state()
        left_out = {"fed-bn": "norm", "fed-rep": "head"}.get(strategy, "nothing")
        found.append({name: tensor for name, tensor in state.items() if not name.startswith(left_out)})
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=1e-4, atol=1e-6)
    assert float(found[0]["body.weight"].abs().sum()) > 0


def test_methods_differ(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 3, "workers": 1}
    found = {
        name: run(
            virtual_engine, train, tmp_path / name, strategy=name, options={**CLIENTS, **options}, **settings
        ).model_state()["body.weight"]
        for name, options in {**METHODS, "plain": {}}.items()
        if name != "plain"
    }
    assert len({tuple(weight.flatten().tolist()) for weight in found.values()}) == len(found)


def look_at_layers(worker: Worker, out: Path) -> None:
    """What each client's turn begins and ends with, and which layers a step changes."""
    model = Observed()
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
    begins, ends, moved = [], [], []
    for _ in range(12):
        for number, (x, y, _) in enumerate(loader):
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            if number == 0:
                begins.append((before["body.weight"], before["head.weight"]))
            step(worker, model, optimizer, x, y)
            after = dict(model.named_parameters())
            moved.append(
                (number, {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])})
            )
            last = after["head.weight"].detach().clone()
        ends.append(last)
    keep(out, "layers", {"begins": begins, "ends": ends, "length": len(loader)})
    keep(out, "moved", [(number, sorted(names)) for number, names in moved])


def test_private_layers_stay_with_their_client_and_train_first(tmp_path: Path) -> None:
    """Three clients in turn, all of them in every round: a client begins with the head that it ended with."""
    options = {"clients": 3, "fraction": 1.0, "private": "head", "sampler": "cyclic"}
    run(virtual_engine, look_at_layers, tmp_path, strategy="fed-rep", workers=1, options=options)
    found, moved = kept(tmp_path, "layers"), kept(tmp_path, "moved")
    heads = [head for _, head in found["begins"]]
    assert torch.equal(heads[0], heads[1])
    assert all(any(torch.equal(head, end) for end in found["ends"][:3]) for head in heads[3:6])
    for first in (0, 3, 6, 9):
        bodies = [body for body, _ in found["begins"][first : first + 3]]
        assert all(torch.equal(body, bodies[0]) for body in bodies), "all begin with the server's"
    half = found["length"] // 2
    assert {tuple(names) for number, names in moved if number < half} == {("head",)}
    assert {tuple(names) for number, names in moved if number >= half} == {("body", "norm")}


def leave_early(worker: Worker, out: Path) -> None:
    """Scripts of other lengths, and passes that are left: what was trained counts."""
    model, optimizer, loader = worker.prepare(model := network(), SGD(model.parameters(), lr=0.1), loader_of(problem()))
    for _ in range(5 if worker.rank else 9):
        for number, (x, y, _) in enumerate(loader):
            step(worker, model, optimizer, x, y)
            if number == 1:
                break


@both_engines
def test_a_run_ends_for_all_with_the_round_in_which_a_script_does(engine: ModuleType, tmp_path: Path) -> None:
    result = run(engine, leave_early, tmp_path, options={"clients": 8, "fraction": 0.5})
    assert len(steps_of(result, 1)) == 10
    assert len(steps_of(result, 0)) == 12, "the third round is the last"
    assert result.iteration == 3


@both_engines
def test_a_script_that_ends_before_its_rounds_says_so(engine: ModuleType, tmp_path: Path) -> None:
    result = run(engine, leave_early, tmp_path, options={"clients": 8, "fraction": 0.5}, max_steps=5)
    assert result.iteration == 3
    assert [event.details for event in result.events if event.name == "ended_early"] == [{"wanted": 5, "by": "script"}]
    enough = run(engine, leave_early, tmp_path / "enough", options={"clients": 8, "fraction": 0.5}, max_steps=2)
    assert enough.iteration == 2
    assert not [event for event in enough.events if event.name == "ended_early"]


def test_a_run_of_one_round_of_clients_is_none_of_local_steps(tmp_path: Path) -> None:
    options = {"clients": 8, "fraction": 0.5}
    result = run(virtual_engine, leave_early, tmp_path, options=options, max_steps=1)
    assert result.iteration == 1
    assert not [event for event in result.events if event.name == "one_round"]


def evaluated(worker: Worker, out: Path) -> None:
    worker.evaluation(lambda model: {"zero": 0.0})
    leave_late(worker, out)


def leave_late(worker: Worker, out: Path) -> None:
    model, optimizer, loader = worker.prepare(model := network(), SGD(model.parameters(), lr=0.1), loader_of(problem()))
    for _ in range(100):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)


@both_engines
def test_a_budget_of_privacy_ends_the_run_and_is_recorded(engine: ModuleType, tmp_path: Path) -> None:
    """Also of a run that goes on from there: it plays no further round."""
    budget = {"clients": 8, "fraction": 0.5, "privacy.noise": "3", "privacy.epsilon": "4"}
    costs = [Central(noise=3.0).spent(rounds=rounds, most_turns=0, sample_rate=0.5) for rounds in range(100)]
    affordable = sum(cost <= 4 for cost in costs) - 1
    assert 3 < affordable < 50
    for out, more in ((tmp_path / "one", {}), (tmp_path / "two", {"resume": tmp_path / "one"})):
        result = run(engine, evaluated, out, strategy="dp-fed-avg", options=budget, max_steps=60, **more)
        assert result.iteration == affordable
        if not more:
            assert result.metrics["epsilon"] == pytest.approx(costs[affordable])
        assert {"wanted": 60, "by": "privacy"} in [event.details for event in result.events]


def whole_rounds(worker: Worker, out: Path) -> None:
    model, optimizer, loader = worker.prepare(model := network(), SGD(model.parameters(), lr=0.1), loader_of(problem()))
    worker.evaluation(lambda model: {"sum": float(sum(each.sum() for each in model.parameters()))})
    for _ in range(12):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)


def test_the_model_that_is_saved_has_no_noise_of_a_round_that_nobody_plays(tmp_path: Path) -> None:
    options = {"clients": 8, "fraction": 1.0}
    result = run(virtual_engine, whole_rounds, tmp_path, strategy="dp-fed-avg", options=options, eval_every=1)
    assert result.iteration == 3
    saved = float(sum(each.sum() for each in result.model_state().values()))
    assert result.evaluations[-1].metrics["sum"] == pytest.approx(saved, abs=1e-5)


def with_statistics(worker: Worker, out: Path) -> None:
    model = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(problem()))
    for _ in range(10):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)


def test_running_statistics_are_no_secret_and_so_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"they changed the buffer '1.running_mean' as well; use layers without"):
        run(virtual_engine, with_statistics, tmp_path, strategy="dp-fed-avg", options={"clients": 4, "fraction": 1.0})


@both_engines
def test_a_run_under_masks_is_the_run_without(engine: ModuleType, tmp_path: Path) -> None:
    """But for rounding; some clients drop out, and the seed says who."""
    options = {"clients": 8, "fraction": 1.0, "partition": "linear"}
    plain = run(engine, leave_late, tmp_path / "plain", options=options, max_steps=3)
    masked = run(engine, leave_late, tmp_path / "masks", options={**options, "secure": "masks"}, max_steps=3)
    torch.testing.assert_close(masked.model_state(), plain.model_state(), rtol=0, atol=1e-6)
    lossy = {**options, "secure": "masks:lost=0.2:threshold=0.55:neighbours=6"}
    first, again = (run(engine, leave_late, tmp_path / out, options=lossy, max_steps=3) for out in ("one", "two"))
    for name, tensor in first.model_state().items():
        assert torch.equal(again.model_state()[name], tensor)
        assert not torch.allclose(plain.model_state()[name], tensor, rtol=0, atol=1e-6)


def fail_in_a_turn(worker: Worker, out: Path) -> None:
    model, optimizer, loader = worker.prepare(model := network(), SGD(model.parameters(), lr=0.1), loader_of(problem()))
    for number in range(4):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)
        if number == 2 and worker.rank == 1:
            raise ValueError("the script's own fault")


def test_a_run_that_fails_closes_what_clients_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process with this test, whose garbage collector closes nothing that is held here."""
    files: list[Any] = []
    make = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **how: files.append(make(**how)) or files[-1])
    with pytest.raises(RunFailed, match="the script's own fault"):
        run(virtual_engine, fail_in_a_turn, tmp_path, strategy="scaffold", options={"clients": 4, "fraction": 1.0})
    assert len(files) == 2
    assert all(file.closed for file in files)


def with_adagrad(worker: Worker, out: Path) -> None:
    """An optimizer that has a state from the start."""
    model = network()
    optimizer = Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    model, optimizer, loader = worker.prepare(model, optimizer, loader_of(problem()))
    first = model[0].weight
    begins = []
    for _ in range(4):
        for number, (x, y, _) in enumerate(loader):
            if number == 0:
                begins.append(float(optimizer.state[first]["sum"].sum()))
            step(worker, model, optimizer, x, y)
    keep(out, "begins", begins)


@pytest.mark.parametrize("state", ["fresh", "kept"])
def test_a_turn_begins_with_the_optimizers_state_that_is_asked_for(state: str, tmp_path: Path) -> None:
    options = {"clients": 2, "fraction": 1.0, "optimizer": state}
    run(local_engine, with_adagrad, tmp_path, workers=1, options=options)
    begins = kept(tmp_path, "begins")
    assert begins[:2] == [80.0] * 2
    assert (begins[2:] == [80.0] * 2) == (state == "fresh")
    assert min(begins[2:]) >= 80.0


def two_loaders(worker: Worker, out: Path) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    worker.prepare(model=model, optimizer=optimizer, one=loader_of(problem()), two=loader_of(problem()))


def test_one_loader_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="a client's turn is a pass over its data; prepare one loader"):
        run(local_engine, two_loaders, tmp_path, workers=1, options={"clients": 4})
