"""Functions and classes on Ray's workers, by Horovod's interface."""

from __future__ import annotations

import os
import queue
import runpy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from paceline.horovod import line as lines
from paceline.horovod import reporting
from paceline.horovod.ray import ElasticRayExecutor, RayExecutor, RayHostDiscovery, actors
from paceline.horovod.ray.runner import Coordinator, MiniSettings
from paceline.horovod.ray.worker import ActorLine, BaseHorovodWorker
from paceline.records import EventRecord, to_plain
from paceline.running.launched import LaunchedRun
from paceline.running.result import Result
from paceline.strategies.horovod import Horovod

RECIPES = Path(__file__).parents[2] / "recipes" / "horovod_on_ray"
SETTINGS = MiniSettings(timeout_s=300, placement_group_timeout_s=300)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give one of num_workers, num_hosts and min_workers"),
        ({"num_workers": 2, "num_hosts": 1}, "give one of"),
        ({"num_workers": 2, "min_workers": 1}, "Both `min_workers` and `num_workers` provided"),
        ({"num_workers": 2, "max_workers": 3}, "max_workers=3 needs a min_workers"),
        ({"min_workers": 4, "max_workers": 3}, "that is not larger"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "gpus_per_worker=1 needs use_gpu=True"),
        ({"num_workers": 1, "reset_limit": 3}, "reset_limit and cooldown_range need min_workers"),
        ({"min_workers": 1, "cooldown_range": (9, 3)}, "a cooldown range is two numbers"),
        ({"min_workers": 1, "override_discovery": False}, "set settings.discovery"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RayExecutor(SETTINGS, **given)
    with pytest.warns(UserWarning, match="nics has no effect"):
        RayExecutor.create_settings(nics={"eth0"})


def test_places_on_hosts_of_different_sizes() -> None:
    coordinator = Coordinator(SETTINGS)
    for rank, node in enumerate("aaabb"):
        coordinator.register("host", node, rank)
    found = coordinator.finalize_registration()
    assert [found[rank]["HOROVOD_LOCAL_RANK"] for rank in range(5)] == [0, 1, 2, 0, 1]
    assert [found[rank]["HOROVOD_LOCAL_SIZE"] for rank in range(5)] == [3, 3, 3, 2, 2]
    assert [found[rank]["HOROVOD_CROSS_RANK"] for rank in range(5)] == [0, 0, 0, 1, 1]
    assert [found[rank]["HOROVOD_CROSS_SIZE"] for rank in range(5)] == [2, 2, 1, 2, 2]
    assert (coordinator.world_size, coordinator.node_id_string) == (5, "a:3,b:2")


def test_slots_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(address: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"Alive": alive, "NodeManagerAddress": address, "Resources": resources}

    monkeypatch.setattr(
        ray, "nodes", lambda: [node("a", CPU=5.0, GPU=1.0), node("b", CPU=1.0), node("c", alive=False, CPU=8.0)]
    )
    assert RayHostDiscovery(cpus_per_slot=2).find_available_hosts_and_slots() == {"a": 2}
    assert RayHostDiscovery().find_available_hosts_and_slots() == {"a": 5, "b": 1}
    assert RayHostDiscovery(use_gpu=True).find_available_hosts_and_slots() == {"a": 1}


def test_a_worker_that_fails_leaves_its_room_before_this_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    ended: queue.Queue[tuple[int, int, list[Any], dict[int, str]]] = queue.Queue()
    variables: queue.Queue[dict[str, Any]] = queue.Queue()

    class Actor:
        """Hears its variables, and fails."""

        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(remote=lambda *given: variables.put(given[0]))

    def get(asked: Any) -> None:
        raise ValueError("no")

    class Loop:
        def ended(self, worker: int, status: int) -> None:
            ended.put((worker, status, [*killed], dict(fleet.hosts)))

    made = SimpleNamespace(options=lambda **given: SimpleNamespace(remote=lambda **given: Actor()))
    monkeypatch.setattr(actors, "ray", SimpleNamespace(remote=lambda kind: made, get=get, kill=killed.append))
    fleet = actors.ActorFleet(actors.Making(1, 2, (None, None, None), {}), len, None, unrecorded())
    fleet.loop, fleet.slots = Loop(), {"a": 2}  # type: ignore[assignment]
    for worker in (1, 2):
        fleet.start(worker, "a")
        assert variables.get(timeout=60)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"  # of both slots, whoever is there
        assert ended.get(timeout=60) == (worker, 1, killed, {})
        assert len(killed) == worker
        fleet.tell(worker, {})  # of which the loop may not know yet
    assert variables.empty()


def test_what_a_worker_says_goes_to_the_loop_and_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [["events", "training", "run", 0, 0.0, {}]]
    said = [{"kind": "ask", "mine": {"port": 1}}, {"kind": "records", "records": records}, {"kind": "over"}]
    heard: queue.Queue[tuple[Any, ...]] = queue.Queue()
    answers: dict[str, Any] = {"message": lambda: said.pop(0), "work": lambda function: "done"}

    class Actor:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(remote=answers.get(name, lambda *given: None))

    made = SimpleNamespace(options=lambda **given: SimpleNamespace(remote=lambda **given: Actor()))
    monkeypatch.setattr(actors, "ray", SimpleNamespace(remote=lambda kind: made, get=lambda asked: asked))
    recorded: Any = SimpleNamespace(keep=lambda *given: heard.put(given), note=heard.put)
    fleet = actors.ActorFleet(actors.Making(1, 0, (None, None, None), {}), len, None, recorded)
    fleet.loop = SimpleNamespace(asked=lambda *given: heard.put(given), ended=lambda *given: heard.put(given))  # type: ignore[assignment]
    fleet.start(3, "a")
    assert [heard.get(timeout=60) for _ in range(3)] == [(3, {"port": 1}), (2, records), (3, 0)]
    assert fleet.results == {3: "done"}


def test_a_worker_says_what_it_has_recorded_before_it_is_over() -> None:
    line = ActorLine()
    actor = BaseHorovodWorker.__new__(BaseHorovodWorker)
    actor._line = line
    event = EventRecord("training", "run", 0, 0.0, {})

    def work(_: Any) -> str:
        kept = reporting.current()
        assert kept is not None
        kept.emit(event)
        return "done"

    try:
        assert actor.work(work) == "done"
        assert [actor.message(), actor.message()] == [
            {"kind": "records", "records": [to_plain(event)]},
            {"kind": "over"},
        ]
        with pytest.raises(ZeroDivisionError):
            actor.work(lambda _: 1 / 0)
        assert actor.message() == {"kind": "over"}
    finally:
        reporting._reporter = None
        lines.connect(None)


def unrecorded() -> LaunchedRun:
    return LaunchedRun("nothing", [], strategy=Horovod(), num_workers=1)


def recipe(name: str) -> Any:
    return runpy.run_path(str(RECIPES / f"{name}.py"))["main"]()


@pytest.mark.slow
@pytest.mark.ray
def test_recipes(ray_here: None) -> None:
    assert recipe("set_up") == [(0, 2, 0), (1, 2, 1)]
    assert recipe("hello") == [f"hello from rank {rank}; ranks add up to 1" for rank in range(2)]
    (_, one), (_, other) = recipe("stateless")
    assert one == other == pytest.approx([1.0] * 3, abs=0.01)
    losses, weights = recipe("stateful")
    assert max(losses[2]) < min(losses[0])
    assert weights == pytest.approx([1.0] * 3, abs=0.05)


@pytest.mark.slow
@pytest.mark.ray
def test_a_function_under_horovod_s_own_name_in_as_many_workers_as_there_is_room(ray_here: None) -> None:
    settings = MiniSettings(timeout_s=300, placement_group_timeout_s=300)  # its own: the executor notes who finds hosts
    executor = RayExecutor(settings, min_workers=2, max_workers=2)
    executor.start(extra_env_vars={"MARK": 7})
    pids = executor.run(_under_horovod_s_name)
    assert len({*pids}) == 2
    executor.shutdown()
    until_s = time.monotonic() + 300
    while any(b"Horovod" in _title(pid) for pid in pids) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not any(b"Horovod" in _title(pid) for pid in pids)
    with pytest.raises(ValueError, match="no workers"):
        executor.run(_under_horovod_s_name)


@pytest.mark.slow
@pytest.mark.ray
def test_callbacks_hear_what_workers_log(ray_here: None) -> None:
    executor = RayExecutor(SETTINGS, num_workers=2)
    executor.start()
    heard: list[dict[str, int]] = []
    also: list[dict[str, int]] = []
    try:
        assert executor.run(_log, args=[3], callbacks=[heard.append, also.append]) == [0, 1]
        assert heard == also
        for rank in range(2):
            assert [said["step"] for said in heard if said["rank"] == rank] == [0, 1, 2]
        with pytest.raises(ray.exceptions.RayTaskError, match="no step is left"):
            executor.execute(lambda _: _log(-1), callbacks=[heard.append])
        assert executor.run(_log, args=[0]) == [0, 1]
        assert len(heard) == 6
    finally:
        executor.shutdown()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("is_older", [False, True])
def test_an_elastic_job_grows_with_its_hosts(
    is_older: bool, ray_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    class Growing:
        slots = 1

        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return {ray.nodes()[0]["NodeManagerAddress"]: self.slots}

    def hear(said: dict[str, int]) -> None:
        heard.append(said)
        hosts.slots = 2

    heard: list[dict[str, int]] = []
    hosts = Growing()
    executor: Any
    if is_older:
        executor = ElasticRayExecutor(
            settings := ElasticRayExecutor.create_settings(timeout_s=300), override_discovery=False
        )
        settings.discovery = hosts
    else:
        settings = MiniSettings(timeout_s=300, discovery=hosts)
        executor = RayExecutor(settings, min_workers=1, override_discovery=False)
    executor.start()
    assert executor.run(_grow, callbacks=[hear]) == [[1, 2], [1, 2]]
    steps = [said["step"] for said in heard if said["rank"] == 0]
    assert steps == [*range(len(steps))]  # nobody went back
    assert {said["size"] for said in heard} == {1, 2}
    (directory,) = (tmp_path / "runs").iterdir()
    result = Result(directory)
    iterations = [sorted(each.iteration for each in result.steps if each.worker == number) for number in range(2)]
    assert iterations[0] == [*range(1, len(steps) + 1)]
    (reformed,) = [event for event in result.events if event.name == "reformed"]
    assert (reformed.details["ranks"], reformed.details["joined"]) == ([0, 1], [1])
    assert iterations[1] == iterations[0][reformed.iteration :]


@pytest.mark.slow
@pytest.mark.ray
def test_there_is_room_for_another_where_a_worker_has_failed(ray_here: None) -> None:
    class Loop:
        ended = staticmethod(lambda worker, status: ended.put((worker, status)))

    def fail_first(rank: Any) -> str:
        if os.environ["HOROVOD_RANK"] == "1":
            raise ValueError("no")
        return "done"

    ended: queue.Queue[tuple[int, int]] = queue.Queue()
    num_cpus = ray.cluster_resources()["CPU"]  # all of them
    fleet = actors.ActorFleet(actors.Making(num_cpus, 0, (None, None, None), {}), fail_first, None, unrecorded())
    fleet.loop = Loop()  # type: ignore[assignment]
    host = ray.nodes()[0]["NodeManagerAddress"]
    try:
        fleet.start(1, host)
        assert ended.get(timeout=300) == (1, 1)
        fleet.start(2, host)
        assert ended.get(timeout=300) == (2, 0)
    finally:
        fleet.close()
    assert fleet.results == {2: "done"}


def _grow() -> list[int]:
    import horovod.torch as hvd
    import torch
    from horovod.ray import ray_logger

    hvd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model, optimizer, step=0, left=5, sizes=[])

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.sizes = [*state.sizes, hvd.size()]
        while state.left:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            ray_logger.log({"rank": hvd.rank(), "size": hvd.size(), "step": state.step})
            state.step += 1
            state.left -= hvd.size() - 1
            time.sleep(0.05)
            state.commit()

    train(state)
    return list(state.sizes)


def _log(steps: int) -> int:
    import horovod.torch as hvd
    from horovod.ray import ray_logger

    hvd.init()
    if steps < 0:
        raise ValueError("no step is left")
    for step in range(steps):
        ray_logger.log({"rank": hvd.rank(), "step": step})
    return int(hvd.rank())


def _under_horovod_s_name() -> int:
    import horovod.torch as hvd

    hvd.init()
    assert hvd.size() == 2
    assert os.environ["MARK"] == "7"
    assert hvd.allgather_object(hvd.rank()) == [0, 1]
    return os.getpid()


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
