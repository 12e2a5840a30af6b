"""TensorFlow's names for strategies, and its description of a cluster."""

from __future__ import annotations

import json
import os
import pickle
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster, Compute, Hosts, Servers
from paceline.compat.strategies import (
    CentralStorageStrategy,
    CommunicationOptions,
    DistributionStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    Task,
    TFConfigClusterResolver,
)
from paceline.engines.world import alone, enter_here
from paceline.errors import RunFailed, UsageError
from paceline.planner import wording
from paceline.planner.observing import observe
from paceline.planner.search import plan
from paceline.running.result import Result
from paceline.strategies import build, name_of

RECIPE = Path(__file__).parents[2] / "recipes" / "mnist_mirrored.py"
HOSTS = {"chief": ["a:1"], "worker": ["a:2", "b:1", "c:1"], "ps": ["b:2", "c:2"]}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


def config(**changes: Any) -> str:
    return json.dumps({"cluster": HOSTS, "task": {"type": "chief", "index": 0}} | changes)


@pytest.mark.parametrize(
    ("made", "strategy", "workers", "in_sync"),
    [
        (lambda: MirroredStrategy(workers=3), "all-reduce", 3, 3),
        (lambda: MirroredStrategy(["/gpu:0", "/device:GPU:1"]), "all-reduce", 2, 2),
        (lambda: CentralStorageStrategy(["CPU:0", "CPU:1"], "/cpu:0"), "central-storage", 2, 2),
        (lambda: MultiWorkerMirroredStrategy(workers=2), "all-reduce", 2, 2),
        (
            lambda: MultiWorkerMirroredStrategy(None, CommunicationOptions(5_000_000, 60, "RING"), workers=2),
            "ring:bucket_mb=5",
            2,
            2,
        ),
        (lambda: ParameterServerStrategy(workers=4, servers=2), "ps-asp:servers=2", 4, 1),
        (lambda: ParameterServerStrategy(TFConfigClusterResolver(config())), "ps-asp:servers=2", 3, 1),
        (lambda: OneDeviceStrategy("/cpu:0"), "single", 1, 1),
    ],
)
def test_names_are_strategies_of_paceline(made: Any, strategy: str, workers: int, in_sync: int) -> None:
    compat = made()
    assert compat.strategy == build(strategy)
    assert (compat.num_workers, compat.num_replicas_in_sync) == (workers, in_sync)
    assert compat.global_batch(32) == 32 * in_sync
    assert compat.per_replica_batch(32 * in_sync) == 32
    again = pickle.loads(pickle.dumps(compat))
    assert (again.strategy, again.num_workers) == (compat.strategy, workers)


def test_central_storage_is_a_name_of_the_command_line() -> None:
    assert name_of(build("central-storage")) == "ps-bsp"
    with pytest.raises(UsageError, match="central-storage has no option servers: it has one server; use ps-bsp"):
        build("central-storage:servers=2")


def test_the_command_that_does_the_same() -> None:
    wanted = "paceline run SCRIPT --strategy ps-asp:servers=2 --workers 4"
    assert ParameterServerStrategy(workers=4, servers=2).command == wanted
    assert OneDeviceStrategy("CPU:0").command == "paceline run SCRIPT --strategy single --workers 1 --device cpu"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: MirroredStrategy(cross_device_ops=object()), "MirroredStrategy: cross_device_ops has no meaning here"),
        (lambda: MirroredStrategy(["GPU:0"], workers=2), "devices and workers both say how many"),
        (lambda: MirroredStrategy([]), "devices must be a list"),
        (lambda: MirroredStrategy("GPU:0"), "devices must be a list"),
        (lambda: MirroredStrategy(["TPU:0"]), "devices: 'TPU:0' is no device of Paceline's"),
        (lambda: MirroredStrategy(["GPU:0", "GPU:0"]), "numbered 0 to 1, each once"),
        (lambda: MirroredStrategy(["GPU:0", "CPU:1"]), "devices names CPUs and GPUs"),
        (lambda: MirroredStrategy(workers=0), "workers must be at least 1, not 0"),
        (lambda: CentralStorageStrategy(parameter_device="GPU:0"), "parameter_device=GPU:0: servers keep"),
        (lambda: OneDeviceStrategy("GPU:1"), "device must be numbered 0 to 0"),
        (lambda: ParameterServerStrategy(variable_partitioner=object()), "variable_partitioner has no meaning here"),
        (lambda: ParameterServerStrategy(servers=0), "servers must be at least 1"),
        (lambda: ParameterServerStrategy(TFConfigClusterResolver(config()), servers=3), "leave the numbers out"),
        (lambda: MultiWorkerMirroredStrategy(TFConfigClusterResolver(config())), "all-reduce has no servers"),
        (lambda: MultiWorkerMirroredStrategy("a:1"), "must be a TFConfigClusterResolver, not str"),
        (lambda: CommunicationOptions(bytes_per_pack=-1), "bytes_per_pack must be at least 0"),
        (lambda: CommunicationOptions(implementation="NCCL"), "implementation=NCCL cannot be chosen"),
        (lambda: MirroredStrategy(workers=3).per_replica_batch(64), "global_batch=64 cannot be divided among 3"),
        (lambda: MirroredStrategy().global_batch(0), "per_replica must be a number of samples"),
        (lambda: MirroredStrategy().run(print, workers=3), "workers is given by MirroredStrategy"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(made: Any, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        made()
    assert said in str(refused.value)


def test_names_of_tensorflow_s_that_something_else_stands_for() -> None:
    with pytest.raises(AttributeError, match=r"has no reduce here: worker.all_reduce\(tensor\)"):
        _ = MirroredStrategy().reduce
    assert not hasattr(MirroredStrategy(), "nothing")


def test_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", config(environment="cloud"))
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec == {job: tuple(hosts) for job, hosts in HOSTS.items()}
    assert resolver.task == Task("chief", 0)
    assert (resolver.num_tasks("chief", "worker"), resolver.num_tasks("x")) == (4, 0)
    assert resolver.hosts("chief", "worker") == ("a", "b", "c")
    assert ParameterServerStrategy().num_workers == 3
    assert ParameterServerStrategy(workers=2).num_workers == 2
    assert MirroredStrategy(workers=2).num_workers == 2
    without_servers = {job: HOSTS[job] for job in ("chief", "worker")}
    monkeypatch.setenv("TF_CONFIG", config(cluster=without_servers))
    assert MultiWorkerMirroredStrategy().num_workers == 4
    with pytest.raises(UsageError, match=r"TF_CONFIG\.cluster\.ps is missing"):
        ParameterServerStrategy()


def test_one_task_starts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", config(task={"type": "worker", "index": 1}))
    with pytest.raises(UsageError, match="index=1 has nothing to start: one command on chief 0 starts every worker"):
        ParameterServerStrategy().run(print)


def test_how_errors_are_shown_changes_once_and_not_by_importing() -> None:
    script = (
        "import importlib, sys; shown = sys.excepthook; import paceline.compat.strategies.cluster_resolver as r\n"
        "assert sys.excepthook is shown\n"
        "for _ in range(3): r.TFConfigClusterResolver(); r = importlib.reload(r)\n"
        "assert sys.excepthook.before is shown"
    )
    environment = {**os.environ, "TF_CONFIG": config()}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=300)


@pytest.mark.parametrize(
    ("text", "then", "said"),
    [
        (config(cluster={"worker": ["a:1", "b"]}), "", r"error: TF_CONFIG\.cluster\.worker\[1\] .*\n"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', "S().run(print)", r"error: .* \(a, b\).* RAY_ADDRESS.*\n"),
        ("", "S(workers=2).run(print, engine='none')", "error: unknown engine 'none'.*\n"),
        ("", "S(workers=2).run(print, workers=3)", "error: workers is given by MultiWorkerMirroredStrategy.*\n"),
        ("", "raise ValueError('on purpose')", r"Traceback(.|\n)*: on purpose\n"),
    ],
    ids=["wrong", "hosts that no Ray cluster has", "a wrong setting", "a setting of its own", "another error"],
)
def test_what_a_script_cannot_have_is_one_line(text: str, then: str, said: str) -> None:
    """And other errors are shown as ever. Nothing is started."""
    script = f"from paceline.compat.strategies import MultiWorkerMirroredStrategy as S; S(); {then}"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"TF_CONFIG": text}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1
    assert re.fullmatch(said, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "TF_CONFIG is not set"),
        ("{", "TF_CONFIG is not JSON"),
        ("[" * 100_000, "TF_CONFIG is not JSON: it nests too deep"),
        ("1" * 5_000, "TF_CONFIG is not JSON"),
        (" " * (1 << 20) + "{}", "more than 1048576"),
        ("[]", "TF_CONFIG must be an object, not []"),
        ("{}", "TF_CONFIG.cluster is missing"),
        (config(clutser={}), "unknown field of TF_CONFIG: 'clutser'; did you mean 'cluster'?"),
        ('{"cluster": {}, "cluster": {}}', 'the field "cluster" stands twice'),
        (config(cluster=[]), "TF_CONFIG.cluster must be an object"),
        (config(cluster={"evaluator": ["a:1"]}), "TF_CONFIG.cluster.evaluator has no meaning here: Paceline evaluates"),
        (config(cluster={"wroker": ["a:1"]}), "'wroker'; did you mean 'worker'?"),
        (config(cluster={"worker": "a:1"}), 'TF_CONFIG.cluster.worker must be a list of "host:port"'),
        (config(cluster={"worker": {"0": "a:1"}}), "TF_CONFIG.cluster.worker must be a list"),
        (config(cluster={"worker": []}), "TF_CONFIG.cluster.worker is empty"),
        (config(cluster={"worker": ["a:1", "a"]}), "TF_CONFIG.cluster.worker[1] must be"),
        (config(cluster={"worker": ["a:0"]}), "TF_CONFIG.cluster.worker[0] must be"),
        (config(cluster={"worker": ["a:" + "9" * 5_000]}), "TF_CONFIG.cluster.worker[0] must be"),
        (config(cluster={"worker": ["u@a:1"]}), "TF_CONFIG.cluster.worker[0] must be"),
        (config(cluster={"worker": ["a\n:1"]}), "TF_CONFIG.cluster.worker[0] must be"),
        (config(cluster={"worker": [7]}), "TF_CONFIG.cluster.worker[0] must be"),
        (config(cluster={"worker": ["a:1", "a:1"]}), 'worker[1] is "a:1", which TF_CONFIG.cluster.worker[0] has'),
        (config(cluster={"chief": ["a:1", "b:1"]}), "TF_CONFIG.cluster.chief must be one host, not 2"),
        (config(task=None), "TF_CONFIG.task must be an object"),
        (config(task={"index": 0}), "TF_CONFIG.task.type is missing"),
        (config(task={"type": "evaluator", "index": 0}), "TF_CONFIG.task.type=evaluator has nothing to do"),
        (config(task={"type": "boss", "index": 0}), "TF_CONFIG.task.type must be one of chief, worker, ps"),
        (config(task={"type": "worker", "index": 3}), "TF_CONFIG.task.index must be 0 to 2 for worker, not 3"),
        (config(task={"type": "worker", "index": True}), "TF_CONFIG.task.index must be 0 to 2"),
        (config(task={"type": "worker", "index": 0, "trial": 1}), "unknown field of TF_CONFIG.task: 'trial'"),
    ],
)
def test_what_is_wrong_in_tf_config_is_named(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        TFConfigClusterResolver(text)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 300
    assert str(refused.value).isprintable()


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["a:1", "b:2"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["worker", "ps", "chief", "type", "index"]) | st.text(max_size=4), inner)
    ),
    max_leaves=8,
)


@given(st.fixed_dictionaries({"cluster": VALUES}, optional={"task": VALUES}) | VALUES)
def test_whatever_it_holds_is_read_or_refused(value: Any) -> None:
    try:
        resolver = TFConfigClusterResolver(json.dumps(value))
    except UsageError as refused:
        assert "TF_CONFIG" in str(refused)  # noqa: PT017
    else:
        assert resolver.cluster_spec == {job: tuple(hosts) for job, hosts in value["cluster"].items()}


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
                TFConfigClusterResolver(config(cluster={"worker": ["a:1", "b:1"]}, task={"type": "worker", "index": 0}))
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
