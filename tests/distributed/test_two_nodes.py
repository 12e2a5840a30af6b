"""Two Ray nodes on this machine count as two hosts: tensors cross the network, and nothing is shared."""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
import safetensors.torch
import torch
from ray.cluster_utils import Cluster

import paceline
from paceline import RunFailed
from paceline.engines.ray.tokens import own_token
from tests.distributed.harness import SCRIPTS, TRAIN, is_training, pids, wait_until
from tests.distributed.local import Listener
from tests.distributed.scripts import full_batch
from tests.distributed.test_elastic import of
from tests.distributed.test_elastic_ad_psgd import require_counted

pytestmark = pytest.mark.ray
NUM_STEPS = 20
SOON_S = 240.0  # of a busy machine; the deadline is 300 s
MARK = "PACELINE_TEST_CLUSTER"


@pytest.fixture(scope="module")
def cluster(program_forks: str) -> Iterator[Cluster]:
    ray.shutdown()  # the Ray of earlier modules: a process has one at a time
    os.environ[MARK] = uuid.uuid4().hex  # known to all processes of this cluster
    with own_token():
        yield from started()
    del os.environ[MARK]


def started() -> Iterator[Cluster]:
    settings = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def train_alone(optimizer: str) -> dict[str, torch.Tensor]:
    """What one plain process comes to with all the data at every step."""
    model, updater = full_batch.build(optimizer)
    for _ in range(NUM_STEPS):
        full_batch.update(model, updater, *full_batch.data())
    return model.state_dict()


@pytest.mark.slow
def test_workers_without_steps_in_common_meet_anew(cluster: Cluster, tmp_path: Path) -> None:
    """One dies on each host, and those who are left meet over the network; each sample counts once."""
    log, out = tmp_path / "log", tmp_path / "out"
    log.mkdir()
    given = ["--fail", "1:5:kill", "--fail", "3:8:kill", "--step-s", "0.02", "--log", str(log)]
    paceline.run(
        SCRIPTS / "survivors.py", strategy="ad-psgd", options={"topology": "chain"}, workers=4, elastic="2:4",
        eval_every=16, address=cluster.address, out=out, watcher=Listener(), arguments=given,
    )  # fmt: skip
    assert sorted(event["who"] for event in of(out, "lost")) == ["worker-1", "worker-3"]
    assert of(out, "reformed")[-1]["details"]["ranks"] == [0, 2]
    require_counted(out)


@pytest.mark.parametrize(
    ("strategy", "options", "num_workers", "optimizer"),
    [
        pytest.param("all-reduce", {}, 4, "momentum", marks=pytest.mark.slow),
        pytest.param("all-reduce", {}, 2, "adamw", marks=pytest.mark.slow),
        pytest.param("ps-bsp", {"servers": 3}, 2, "adam", marks=pytest.mark.slow),
        pytest.param("ps-bsp", {"servers": 1}, 2, "adamw", marks=pytest.mark.slow),
    ],
)
def test_synchronous_strategies_equal_one_process(
    cluster: Cluster, tmp_path: Path, strategy: str, options: dict[str, int], num_workers: int, optimizer: str
) -> None:
    """Every optimizer under all-reduce and under a parameter server; one server and three: to float32 rounding."""
    listener = Listener()
    result = paceline.run(
        SCRIPTS / "full_batch.py", strategy=strategy, workers=num_workers, options=options, max_steps=NUM_STEPS,
        address=cluster.address, out=tmp_path / "out", watcher=listener, arguments=[optimizer],
    )  # fmt: skip
    assert result.iteration == NUM_STEPS
    trained, alone = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), train_alone(optimizer)
    assert trained.keys() == alone.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, name))

    lines = sorted(line for _, line in listener.lines if line.startswith("rank"))
    found = [re.fullmatch(r"rank (\d) local (\d) node (\d+)", line).groups() for line in lines]  # type: ignore[union-attr]
    per_node = num_workers // 2
    assert [(int(rank), int(local)) for rank, local, _ in found] == [(r, r % per_node) for r in range(num_workers)]
    nodes = [node for _, _, node in found]
    assert len(set(nodes)) == 2
    assert nodes == sorted(nodes, key=nodes.index), "ranks run host by host"


@pytest.mark.slow
def test_a_server_that_dies_has_a_replica_on_the_other_node(cluster: Cluster, tmp_path: Path) -> None:
    models = []
    for name, faults in (("whole", []), ("struck", ["--fault", "kill-server"])):
        out = tmp_path / name
        listener = Listener()
        given = [*faults, "--rank", "1", "--step", "40", "--step-s", "0.02", "--results", str(out)]
        result = paceline.run(
            TRAIN, strategy="ps-bsp", workers=2, options={"servers": 2, "replicas": 1}, max_steps=100,
            address=cluster.address, out=out, watcher=listener, arguments=given,
        )  # fmt: skip
        assert result.iteration == 100
        models.append(safetensors.torch.load_file(out / "model.safetensors"))
        assert any("has key range 1 now" in line for line in listener.of("run")) == bool(faults)
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


@pytest.mark.slow
def test_asynchronous_servers(cluster: Cluster, tmp_path: Path) -> None:
    result = paceline.run(
        TRAIN, strategy="ps-asp", workers=2, options={"servers": 2}, max_steps=100, address=cluster.address,
        out=tmp_path / "out", watcher=Listener(),
    )  # fmt: skip
    assert result.iteration == 100
    assert {record.worker for record in result.updates} == {0, 1}
    assert result.metrics["loss"] < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp"])
def test_killed_worker_on_the_other_node(cluster: Cluster, tmp_path: Path, strategy: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(RunFailed) as caught:
        paceline.run(
            TRAIN, strategy=strategy, workers=2, address=cluster.address, out=out, watcher=Listener(),
            arguments=["--fault", "kill", "--rank", "1", "--loaders", "2", "--child", "--results", str(out)],
        )  # fmt: skip
    took_s = time.time() - float((out / "struck").read_text())
    print(f"{strategy}: {took_s:.1f} s from the kill to the end")
    assert took_s < SOON_S
    assert str(caught.value) == f"worker 1 (process {pids(out)['worker-1']}) died during step 5"
    assert wait_until(lambda: not _sleepers())


@pytest.mark.slow
def test_killed_node(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    struck: list[float] = []

    def strike() -> None:
        wait_until(lambda: is_training(out))
        processes = _of_node(pids(out)["worker-1"])
        struck.append(time.time())
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    thread = threading.Thread(target=strike)
    thread.start()
    with pytest.raises(RunFailed) as caught:
        paceline.run(
            TRAIN, strategy="ps-bsp", workers=2, options={"servers": 2}, address=cluster.address, out=out,
            watcher=Listener(), arguments=["--step-s", "0.05"],
        )  # fmt: skip
    thread.join()
    print(f"{time.time() - struck[0]:.1f} s from the node's end to the run's")
    assert time.time() - struck[0] < SOON_S
    assert f"worker 1 (process {pids(out)['worker-1']}) died during step" in str(caught.value)


def _of_node(worker: int) -> list[psutil.Process]:
    """This worker's raylet, all that it has started, and its workers, which may be forks of another process."""
    number = psutil.Process(worker).environ()["RAY_RAYLET_PID"]
    raylet = psutil.Process(int(number))
    found = [raylet, *raylet.children(recursive=True)]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process] if process.environ().get("RAY_RAYLET_PID") == number else []
    return found


def _sleepers() -> list[psutil.Process]:
    """What this cluster's scripts left; those of other tests, which may run beside this one, do not count."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            is_own = process.info["cmdline"] == ["sleep", "600"] and process.environ().get(MARK) == os.environ[MARK]
            found += [process] if is_own else []
    return found
