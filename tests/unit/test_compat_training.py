"""Scripts train under TensorFlow's names for strategies."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster, Compute, Hosts, Servers
from paceline.compat.strategies import (
    CentralStorageStrategy,
    DistributionStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    TFConfigClusterResolver,
)
from paceline.engines.world import alone, enter_here
from paceline.errors import RunFailed, UsageError
from paceline.planner import wording
from paceline.planner.observing import observe
from paceline.planner.search import plan
from paceline.running.result import Result
from paceline.strategies import name_of

RECIPE = Path(__file__).parents[2] / "recipes" / "mnist_mirrored.py"


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


def on(*, hosts: int, workers: int) -> Cluster:
    return Cluster(
        hosts=(Hosts(count=hosts, workers=workers, bandwidth_gbit_per_s=1.0),),
        compute=Compute(step_s=1e-3),
        servers=Servers(placement="with workers"),
    )


def train(strategy: DistributionStrategy, global_batch: int = 8) -> None:
    with strategy.scope() as worker:
        assert worker is paceline.init()
        model = nn.Linear(3, 1)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    x = torch.arange(48.0).reshape(16, 3) / 48
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=strategy.per_replica_batch(global_batch), shuffle=True)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, wanted in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), wanted).backward()
            optimizer.step()


def run(strategy: DistributionStrategy, out: Path, *, hosts: int = 1, workers: int = 2) -> Result:
    result = strategy.run(train, (strategy,), engine="virtual", cluster=on(hosts=hosts, workers=workers), out=out)
    assert result is not None
    return result


def test_replicas_and_one_device_train_the_same_model(tmp_path: Path) -> None:
    one = run(OneDeviceStrategy("CPU:0"), tmp_path / "one").model_state()
    made: dict[str, DistributionStrategy] = {
        "mirrored": MirroredStrategy(["CPU:0", "CPU:1"]),
        "central": CentralStorageStrategy(["CPU:0", "CPU:1"]),
        "several": MultiWorkerMirroredStrategy(workers=2),
    }
    for name, strategy in made.items():
        result = run(strategy, tmp_path / name)
        assert result.manifest["num_workers"] == 2
        assert result.manifest["program"] == "train"
        torch.testing.assert_close(result.model_state(), one)


def test_without_waiting_each_gradient_is_an_update(tmp_path: Path) -> None:
    result = run(ParameterServerStrategy(workers=2, servers=2), tmp_path / "run")
    assert (result.unit, result.iteration) == ("gradient", 4)


@pytest.mark.parametrize(
    ("made", "hosts", "said"),
    [
        (lambda: MirroredStrategy(workers=2), 2, "MirroredStrategy is of one host"),
        (
            lambda: MultiWorkerMirroredStrategy(
                TFConfigClusterResolver(
                    json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})
                )
            ),
            1,
            r"is of 2 hosts by TF_CONFIG \(a, b\), and all 2 workers would be on this one",
        ),
    ],
)
def test_workers_are_on_the_hosts_that_the_name_says(made: Any, hosts: int, said: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, RunFailed), match=said):
        run(made(), tmp_path / "run", hosts=hosts, workers=2 // hosts)


@pytest.fixture
def in_a_world_of_one() -> Iterator[None]:
    world = alone()
    enter_here(world)
    yield
    for finish in world.at_end:
        finish()
    world.release()
    enter_here(None)


@pytest.mark.usefixtures("in_a_world_of_one")
def test_in_a_process_that_trains_the_names_are_of_its_run() -> None:
    called: list[int] = []
    for strategy in (MirroredStrategy(), ParameterServerStrategy(), OneDeviceStrategy("CPU:0")):
        assert strategy.num_workers == 1
        assert strategy.run(called.append, (1,)) is None
    assert called == [1, 1, 1]
    with pytest.raises(
        UsageError, match=r"with 2 worker\(s\) and 0 server.* this run is single with 1 and 0; .*--workers 2"
    ):
        MirroredStrategy(workers=2).run(called.append, (1,))
    with pytest.raises(UsageError, match="starts workers, and this process is one already"):
        MirroredStrategy().run_script("train.py")


@pytest.mark.usefixtures("in_a_world_of_one")
def test_the_recipe_in_a_process_that_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["mnist_mirrored.py", "--dataset", "digits", "--epochs", "4", "--batch-size", "300"]
    )
    runpy.run_path(str(RECIPE))["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines] == [
        *(f"epoch {epoch}: learning rate 0.001" for epoch in (1, 2, 3)),
        "epoch 4: learning rate 0.0001",
    ]


def test_a_run_of_another_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        (UsageError, RunFailed), match=r"MirroredStrategy is all-reduce with 2 worker.* this run is ps-asp"
    ):
        paceline.run(
            partial(train, MirroredStrategy(workers=2)),
            strategy="ps-asp",
            workers=2,
            engine="virtual",
            cluster=on(hosts=1, workers=2),
            out=tmp_path / "run",
        )


@pytest.mark.slow
@pytest.mark.ray
def test_the_recipe_trains_saves_and_goes_on(ray_here: None, tmp_path: Path) -> None:
    main = runpy.run_path(str(RECIPE))["main"]
    out = tmp_path / "run"
    arguments = ["--workers", "2", "--dataset", "digits", "--checkpoint-every", "5"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mnist_mirrored.py", *arguments, "--epochs", "3", "--out", str(out)])
        main()
        first = Result.open(out)
        num_first, accuracy = first.iteration, first.metrics["accuracy"]
        patch.setattr(sys, "argv", ["mnist_mirrored.py", *arguments, "--epochs", "4", "--resume", str(out)])
        main()
    again = Result.open(out)
    assert accuracy > 0.85
    assert again.iteration == num_first // 3 * 4
    assert again.manifest["resumed_from"] == str(out)


@pytest.mark.slow
@pytest.mark.ray
def test_a_script_runs_as_its_name_says(ray_here: None, tmp_path: Path) -> None:
    strategy = CentralStorageStrategy(workers=2)
    result = strategy.run_script(
        RECIPE.with_name("mnist.py"), ["--dataset", "digits"], max_steps=5, out=tmp_path / "run"
    )
    assert (result.manifest["strategy"]["name"], result.iteration) == ("ps-bsp", 5)


def in_words_of(made: Callable[[], DistributionStrategy]) -> None:
    with made().scope() as worker:
        model = nn.Linear(4, 1)
        data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
        model, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


ASKED = ("single", "all-reduce", "ring", "ps-bsp", "ps-ssp", "ps-asp", "gossip", "local-sgd")
LAB = Cluster(hosts=(Hosts(count=4, bandwidth_gbit_per_s=1.0),), compute=Compute(step_s=0.1), servers=Servers())


@pytest.mark.parametrize(
    ("made", "ranked"),
    [
        (MirroredStrategy, {"single", "all-reduce", "ring"}),
        (MultiWorkerMirroredStrategy, {"single", "all-reduce", "ring"}),
        (
            ParameterServerStrategy,
            {"single", *(f"ps-{name}" for name in ("asp", "ssp", "asp:servers=2", "ssp:servers=2"))},
        ),
        (partial(ParameterServerStrategy, servers=2), {"single", "ps-asp:servers=2", "ps-ssp:servers=2"}),
        (partial(OneDeviceStrategy, "CPU:0"), {"single"}),
    ],
)
def test_a_plan_has_what_the_script_runs_under(made: Any, ranked: set[str]) -> None:
    found = plan(LAB, observe(partial(in_words_of, made)).work, strategies=ASKED, num_checks=0)
    assert {point.label for point in found.points} == ranked
    said = " ".join(wording.answer(found))
    assert f"each of which the script's {made().name} refuses: it is {name_of(made().strategy)}" in said
    assert ("MirroredStrategy takes one host" in said) == (made is MirroredStrategy)
    assert "no host is free" not in said
