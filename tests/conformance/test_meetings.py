"""Scripts whose workers run free meet where they ask for it, and see one model there."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import RunFailed
from paceline.strategies import build
from tests.conformance import local_engine, virtual_engine


def script(
    out: Path, *, evaluates: bool = False, places: tuple[str, str] = ("here", "here"), save: str = "", load: str = ""
) -> None:
    worker = paceline.init()
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(32, 3)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, batches = worker.prepare(model, optimizer, loader)
    if evaluates:
        worker.evaluation(lambda model: {"total": float(worker.all_reduce(torch.ones(1)))})
    if load:
        with torch.no_grad():
            for parameter, saved in zip(model.parameters(), torch.load(out.parent / load / "weights"), strict=True):
                parameter.copy_(saved)
        worker.load_run_state((out.parent / load / "state").read_bytes())
    told = []
    for _ in range(1 if load else 2):
        for x, y in batches:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with worker.meeting(places[worker.rank]):
            total = worker.all_reduce(torch.tensor([worker.rank + 1.0]))
            assert float(total) == 3.0
            before = [parameter.detach().clone() for parameter in model.parameters()]
            with worker.global_model():
                told = [parameter.flatten().tolist() for parameter in model.parameters()]
                state = worker.run_state()
                momentum = worker.optimizer_state(optimizer)["state"]
                if worker.rank == 0 and save and not (out / "state").exists():
                    torch.save([parameter.detach().clone() for parameter in model.parameters()], out / "weights")
                    (out / "state").write_bytes(state)
                assert bool(state) == (worker.rank == 0)
                assert worker.rank or sorted(momentum) == [0, 1]
            assert all(map(torch.equal, before, model.parameters()))
    (out / f"told-{worker.rank}").write_text(json.dumps(told))


def told(out: Path, rank: int) -> list[list[float]]:
    return list(json.loads((out / f"told-{rank}").read_text()))


FIRST_COMERS = ("ps-bsp:backup_workers=1:servers=2", "async-diloco:every=3", "async-diloco:every=3:quorum=2")


@pytest.mark.parametrize(
    "strategy", ["all-reduce", "ps-asp", "gossip", *FIRST_COMERS, "fed-avg:clients=4:fraction=0.5"]
)
def test_all_see_one_model_in_a_meeting(strategy: str, tmp_path: Path) -> None:
    """Also in the middle of a round, which goes on afterwards."""
    local_engine.run(partial(script, tmp_path), strategy=build(strategy), workers=2, out=tmp_path)
    assert told(tmp_path, 0) == told(tmp_path, 1)


def step_alike() -> None:
    """Each step takes as much off the weight, whatever it is, and all meet after each."""
    worker = paceline.init()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    loader = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=1)
    model, optimizer, batches = worker.prepare(model, optimizer, loader)
    for (x,) in batches:
        time.sleep(0.02 * worker.rank)
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        with worker.meeting("here"), worker.global_model():
            pass


def test_a_round_that_is_under_way_goes_on_after_a_meeting(tmp_path: Path) -> None:
    strategy = build("async-diloco:every=3:outer=average")
    local_engine.run(step_alike, strategy=strategy, workers=2, out=tmp_path, checkpoint_every=1000)
    assert load_file(tmp_path / "model.safetensors")["weight"].item() == -0.25 * 16


@pytest.mark.parametrize("strategy", ["ps-bsp", "gossip"])
def test_a_run_goes_on_from_what_its_script_has_saved(strategy: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    local_engine.run(partial(script, first, save="state"), strategy=strategy, workers=2, out=first)
    local_engine.run(partial(script, second, load="first"), strategy=strategy, workers=2, out=second)
    assert told(second, 0) == told(first, 0)


def test_workers_meet_when_a_round_of_clients_is_over(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"here: rank . has 1 of its clients left in round 1"):
        local_engine.run(partial(script, tmp_path), strategy="fed-avg:clients=6:fraction=0.5", workers=2, out=tmp_path)


def test_workers_that_wait_at_different_places_are_told(tmp_path: Path) -> None:
    run = partial(script, tmp_path, places=("here", "there"))
    with pytest.raises(RunFailed, match="waits for all at here, and rank 1 is at there"):
        local_engine.run(run, strategy="ps-asp", workers=2, out=tmp_path)


def test_an_evaluation_cannot_ask_all_workers(tmp_path: Path) -> None:
    """It runs on one of them."""
    with pytest.raises(RunFailed, match="all_reduce in the evaluation, which runs on this rank alone"):
        local_engine.run(
            partial(script, tmp_path, evaluates=True), strategy="gossip", workers=2, out=tmp_path, eval_every=1
        )


def test_no_step_is_lost_with_the_global_model(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"optimizer\.step\(\) inside of worker\.global_model\(\)"):
        virtual_engine.run(step_inside, strategy="local-sgd:every=2", workers=2, out=tmp_path)


def step_inside() -> None:
    worker, model = paceline.init(), nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.ones(16, 3)), batch_size=4)
    model, optimizer, batches = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for (x,) in batches:
        model(x).mean().backward()
        with worker.meeting("here"), worker.global_model():
            optimizer.step()
