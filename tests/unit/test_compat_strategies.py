"""TensorFlow's names for strategies, and its description of a cluster."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.compat.strategies import (
    CentralStorageStrategy,
    CommunicationOptions,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    Task,
    TFConfigClusterResolver,
)
from paceline.errors import UsageError
from paceline.strategies import build, name_of

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
@pytest.mark.usefixtures("forked_programs")
def test_what_a_script_cannot_have_is_one_line(text: str, then: str, said: str, tmp_path: Path) -> None:
    """And other errors are shown as ever. Nothing is started."""
    script = tmp_path / "script.py"
    script.write_text(f"from paceline.compat.strategies import MultiWorkerMirroredStrategy as S; S(); {then}")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"TF_CONFIG": text}
    done = subprocess.run(
        ["python", str(script)], env=environment, capture_output=True, text=True, check=False, timeout=300
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
