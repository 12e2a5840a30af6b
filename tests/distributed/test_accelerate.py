"""Scripts of Accelerate's train under Paceline's strategies as Accelerate by itself trains them in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import RunFailed
from tests.conformance import local_engine
from tests.covering import in_turns
from tests.forks import having_loaded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="Accelerate is not installed (paceline[frameworks])"),
]
SAMPLES, GLOBAL_BATCH, EPOCHS = 64, 16, 3
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Iterator[None]:
    with having_loaded("accelerate", "paceline.accelerate"):
        yield


def data(samples: int) -> TensorDataset:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def train(
    out: Path,
    *,
    is_plain: bool = False,
    batch_size: int = GLOBAL_BATCH // 2,
    every: int = 1,
    clip: float | None = None,
    saves_after: int | None = None,
    resumes: Path | None = None,
    skips: int = 0,
    shuffle: bool = False,
    split_batches: bool = False,
    tests_first: bool = False,
) -> None:
    """The script, with its one line changed or not."""
    if is_plain:
        from accelerate import Accelerator
    else:
        from paceline.accelerate import Accelerator  # type: ignore[assignment]
    from accelerate.utils import DataLoaderConfiguration
    from safetensors import safe_open

    config = DataLoaderConfiguration(split_batches=split_batches)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every, dataloader_config=config)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = DataLoader(data(SAMPLES), batch_size=batch_size, shuffle=shuffle)
    testing = DataLoader(data(30), batch_size=8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8 * (1 if is_plain else 2), gamma=0.5)
    if tests_first:
        testing, training, scheduler, optimizer, model = accelerator.prepare(
            testing, training, scheduler, optimizer, model
        )
    else:
        model, optimizer, training, testing, scheduler = accelerator.prepare(
            model, optimizer, training, testing, scheduler
        )
    steps = 0
    begins = training
    if resumes is not None:
        accelerator.load_state(str(resumes))
        steps = int(resumes.name)
        begins = accelerator.skip_first_batches(training, skips)
    for epoch in range(steps // 4, EPOCHS):
        for x, y in begins if epoch == steps // 4 else training:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps += 1
            if steps == saves_after:
                accelerator.save_state(str(out / str(steps)))
    model.eval()
    found = []
    with torch.no_grad():
        for x, y in testing:
            prediction, target = accelerator.gather_for_metrics((model(x), y))
            found += (prediction - target).flatten().tolist()
    said = {
        "weights": [parameter.flatten().tolist() for parameter in accelerator.unwrap_model(model).parameters()],
        "found": sorted(found),
        "steps": steps,
        "world": [accelerator.num_processes, accelerator.process_index, accelerator.is_main_process],
        "sum": float(accelerator.reduce(torch.tensor(float(accelerator.process_index + 1)))),
    }
    state = accelerator.unwrap_model(model).state_dict()
    accelerator.save(state, out / "saved.safetensors", safe_serialization=True)
    accelerator.wait_for_everyone()
    with safe_open(out / "saved.safetensors", "pt") as saved:
        said["saved"] = [saved.get_tensor(name).flatten().tolist() for name in state]
    (out / f"found-{accelerator.process_index}.json").write_text(json.dumps(said))


def trained(out: Path, strategy: str, *, max_steps: int | None = None, **script: Any) -> dict[str, Any]:
    workers = 1 if script.get("is_plain") else 2
    local_engine.run(partial(train, out, **script), strategy=strategy, workers=workers, out=out, max_steps=max_steps)
    return dict(json.loads((out / "found-0.json").read_text()))


def alone(out: Path, **script: Any) -> dict[str, Any]:
    return trained(out, "single", is_plain=True, batch_size=GLOBAL_BATCH, **script)


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for one, other in zip(found["weights"], expected["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), **CLOSE)
    assert found["found"] == pytest.approx(expected["found"], abs=1e-4)
    assert found["steps"] == expected["steps"]


SCRIPTS: dict[str, dict[str, Any]] = {"plain": {}, "accumulation": {"every": 2}, "clipping": {"clip": 0.1}}


@pytest.mark.parametrize(("strategy", "name"), in_turns(SCRIPTS, ["all-reduce", "ps-bsp:servers=2"]))
def test_workers_in_lock_step_train_what_one_process_trains(strategy: str, name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    found = trained(tmp_path / "two", strategy, **script)
    assert_alike(found, alone(tmp_path / "one", **script))
    assert found["world"] == [2, 0, True]
    assert found["sum"] == 3.0
    assert found["saved"] == found["weights"]


FIRST_COMERS = ("async-diloco:every=3", "ps-bsp:backup_workers=1")
FREE = ("ps-asp", "gossip", "local-sgd:every=2", "ad-psgd", "diloco:every=2", *FIRST_COMERS)


@pytest.mark.parametrize("strategy", FREE)
def test_workers_that_run_free_gather_all_of_each_others_metrics(strategy: str, tmp_path: Path) -> None:
    found = trained(tmp_path, strategy, saves_after=6)
    other = json.loads((tmp_path / "found-1.json").read_text())
    assert found["found"] == other["found"]
    assert len(found["found"]) == 30


def test_a_pass_is_a_round_of_clients(tmp_path: Path) -> None:
    found = trained(tmp_path, "fed-avg:clients=6:fraction=0.5")
    other = json.loads((tmp_path / "found-1.json").read_text())
    assert found["steps"] != other["steps"]
    assert found["steps"] + other["steps"] == EPOCHS * 3 * 2, (
        "of three clients one worker plays two; each has two batches"
    )
    assert found["found"] == other["found"]
    with pytest.raises(RunFailed, match="begin a new run from the weights"):
        trained(tmp_path / "resumed", "fed-avg:clients=6:fraction=0.5", resumes=tmp_path / "4")


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp", "gossip"])
def test_a_resumed_run_equals_an_uninterrupted_one(strategy: str, tmp_path: Path) -> None:
    for steps, skips in (4, 0), (6, 2):
        whole = trained(tmp_path / f"whole-{steps}", strategy, shuffle=True, saves_after=steps)
        saved = tmp_path / f"whole-{steps}" / str(steps)
        resumed = trained(tmp_path / f"resumed-{steps}", strategy, shuffle=True, resumes=saved, skips=skips)
        assert resumed["weights"] == whole["weights"]


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-asp"])
def test_the_runs_budget_ends_the_script(strategy: str, tmp_path: Path) -> None:
    found = trained(tmp_path, strategy, max_steps=10)
    assert found["steps"] <= 10
    assert len(found["found"]) == 30


def test_the_loader_for_evaluation_may_come_first(tmp_path: Path) -> None:
    first, last = (trained(tmp_path / str(n), "all-reduce", shuffle=True, tests_first=n == 0) for n in range(2))
    assert first == last
    with pytest.raises(RunFailed, match=r"training = accelerator\.prepare\(model, optimizer, training\)"):
        trained(tmp_path / "told", "all-reduce", tests_first=True)


def look_then_train() -> None:
    """It looks at one loader, which is taken for its training data, and trains on the other."""
    from paceline.accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looked_at, trained_on = DataLoader(data(8), batch_size=2), DataLoader(data(8), batch_size=2)
    looked_at, trained_on, model, optimizer = accelerator.prepare(looked_at, trained_on, model, optimizer)
    for _ in looked_at:
        pass
    for x, y in trained_on:
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()


def test_a_loop_over_another_loader_is_told_after_the_first_was_looked_at(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"training = accelerator\.prepare\(model, optimizer, training\)"):
        local_engine.run(look_then_train, strategy="all-reduce", workers=2, out=tmp_path)


@pytest.mark.parametrize("order", [["tests", "shuffled"], ["shuffled", "tests"], ["own", "shuffled"], ["shuffled"] * 2])
def test_what_is_taken_for_training_data(order: list[str]) -> None:
    from paceline.accelerate.loader import training_data

    made = {
        "tests": lambda: DataLoader(data(8)),
        "shuffled": lambda: DataLoader(data(8), batch_size=2, shuffle=True),
        "own": lambda: DataLoader(data(8), sampler=torch.utils.data.DistributedSampler(data(8), 2, 0)),
    }
    loaders = [made[kind]() for kind in order]
    assert training_data(loaders) is loaders[order[0] == "tests"]
    assert training_data(loaders[:1]) is loaders[0]


def test_what_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="leave them out"):
        trained(tmp_path, "all-reduce", split_batches=True)
    with pytest.raises(RunFailed, match=r"the script itself exchanges, .* choose another strategy, such as all-reduce"):
        trained(tmp_path, "horovod")
