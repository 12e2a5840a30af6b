"""What exchanges cost on the virtual engine besides what passes the links, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import _get_current_dispatch_mode

from paceline.cluster.description import Cluster, Communication, Compute, Servers
from paceline.errors import RunFailed
from paceline.running.result import Result
from paceline.training.worker import Worker
from tests.conformance.rows import loader_of, problem
from tests.conformance.virtual_cluster import GIGABIT, PLAIN, STEP_S, cluster_of, run, tiny

NUM_STEPS = 20


def step_s(result: Result) -> float:
    """Of the steps after the first, in which scripts are looked at."""
    own = [step.time_s for step in result.steps if step.worker == 0]
    return (own[-1] - own[0]) / (len(own) - 1)


def taken_s(out: Path, strategy: str, workers: int, cluster: Cluster, *, script: Any = tiny, **settings: Any) -> float:
    return step_s(run(script, out, strategy, workers, cluster=cluster, max_steps=NUM_STEPS, **settings))


def test_an_operation_costs_each_step_once_a_bucket(tmp_path: Path) -> None:
    cluster = replace(cluster_of(), communication=Communication(operation_us=3000.0))
    assert taken_s(tmp_path, "all-reduce", 4, cluster) == pytest.approx(STEP_S + 3e-3, rel=0.001)


def test_a_message_costs_its_sender(tmp_path: Path) -> None:
    """A ring of four has six rounds, in each of which everybody sends one message."""
    cluster = replace(cluster_of(), communication=Communication(message_us=500.0))
    found_s = taken_s(tmp_path, "all-reduce", 4, cluster, options={"algorithm": "ring"})
    assert found_s == pytest.approx(STEP_S + 6 * 0.5e-3, rel=0.001)


def test_a_request_costs_the_worker_once_and_the_server_for_each_worker(tmp_path: Path) -> None:
    """Three workers ask at the same time, and the server answers all when it has heard the third."""
    cluster = replace(cluster_of(), communication=Communication(request_us=1000.0), servers=Servers(request_us=2000.0))
    found_s = taken_s(tmp_path, "ps-bsp", 3, cluster, options=PLAIN)
    assert found_s == pytest.approx(STEP_S + 1e-3 + 3 * 2e-3, rel=0.001)


def large(worker: Worker, out: Path) -> None:
    """8 MB of parameters, hardly a computation."""
    model = nn.Linear(10, 4)
    model.table = nn.Parameter(torch.zeros(2_000_000))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1e-3), loader_of(problem()))
    while True:
        for x, _, _ in loader:
            optimizer.zero_grad()
            (model(x).sum() * 1e-6 + model.table.sum()).backward()
            optimizer.step()


@pytest.mark.parametrize(("num_workers", "passes"), [(1, 2), (3, 6)])
def test_packing_holds_a_server_up_in_both_directions(num_workers: int, passes: int, tmp_path: Path) -> None:
    """What comes and what goes pass the server's one core, at an eighth of the link's rate here."""
    cluster = cluster_of(gbit_per_s=8.0)
    cluster = replace(cluster, communication=Communication(packing_gbyte_per_s=GIGABIT / 1e9))
    found_s = taken_s(tmp_path, "ps-bsp", num_workers, cluster, script=large, options=PLAIN)
    assert found_s == pytest.approx(STEP_S + passes * 8e6 / GIGABIT, rel=0.05)


def test_hosts_of_one_machine_share_its_cores(tmp_path: Path) -> None:
    shared = replace(cluster_of(), shared_cores=2)
    assert taken_s(tmp_path / "two", "all-reduce", 2, shared) == pytest.approx(STEP_S, rel=0.001)
    assert taken_s(tmp_path / "six", "all-reduce", 6, shared) == pytest.approx(3 * STEP_S, rel=0.001)
    # They have them in turn: the first and the third have one.
    assert taken_s(tmp_path / "three", "all-reduce", 3, shared) == pytest.approx(2 * STEP_S, rel=0.001)


def test_who_waits_for_nobody_has_a_core_to_itself(tmp_path: Path) -> None:
    """The first and the third worker share a core, and the second has the other one."""
    shared = replace(cluster_of(), shared_cores=2)
    result = run(tiny, tmp_path, "ps-asp", 3, cluster=shared, max_time_s=20 * STEP_S)
    num_steps = [sum(step.worker == worker for step in result.steps) for worker in range(3)]
    assert num_steps[1] == pytest.approx(20, abs=1)
    assert num_steps[0] == pytest.approx(10, abs=1)
    assert num_steps[2] == pytest.approx(10, abs=1)


def test_a_servers_requests_take_their_core_from_the_worker_there(tmp_path: Path) -> None:
    """Two workers and a server with the first: 4 ms of a core for each end of the other's request, and for each end of
    this one's half as much. So one core has STEP_S and 8 ms to do, and the other one STEP_S and 4 ms, then to wait for
    the server."""
    cluster = replace(cluster_of(placement="with workers"), communication=Communication(request_core_us=8000.0))
    alone_s = taken_s(tmp_path / "alone", "ps-bsp", 2, cluster, options=PLAIN)
    assert alone_s == pytest.approx(STEP_S, rel=0.001)
    shared_s = taken_s(tmp_path / "shared", "ps-bsp", 2, replace(cluster, shared_cores=2), options=PLAIN)
    assert shared_s == pytest.approx(STEP_S + 8e-3, rel=0.01)


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-asp"])
def test_what_shares_cores_is_the_same_each_time(strategy: str, tmp_path: Path) -> None:
    costs = Communication(request_core_us=700.0, message_core_us=300.0, packing_gbyte_per_s=1.0)
    cluster = cluster_of(placement="with workers", distribution="exponential")
    cluster = replace(cluster, shared_cores=2, communication=costs)
    first, again = (run(tiny, tmp_path / name, strategy, 5, cluster=cluster, max_steps=NUM_STEPS) for name in "ab")
    assert first.steps == again.steps
    assert len({step.time_s for step in first.steps}) >= NUM_STEPS


def test_shared_cores_pack_no_faster_than_they_are(tmp_path: Path) -> None:
    """Four servers and four workers on the same hosts: each host packs 3/4 of 8 MB four times, on one core in all."""
    cluster = cluster_of(gbit_per_s=800.0, placement="with workers")
    costs = Communication(packing_gbyte_per_s=GIGABIT / 1e9)
    alone, together = (replace(cluster, communication=costs, shared_cores=cores) for cores in (None, 1))
    options = {"servers": 4, **PLAIN}
    packed_s = 4 * 0.75 * 8e6 / GIGABIT
    alone_s = taken_s(tmp_path / "alone", "ps-bsp", 4, alone, script=large, options=options)
    assert alone_s == pytest.approx(STEP_S + packed_s, rel=0.1)
    together_s = taken_s(tmp_path / "together", "ps-bsp", 4, together, script=large, options=options)
    assert together_s == pytest.approx(4 * STEP_S + 4 * packed_s, rel=0.1)
    # And looked at, and updated, which takes as long again.
    handling = replace(together, communication=replace(costs, exchange_gbyte_per_s=GIGABIT / 2e9))
    handled_s = taken_s(tmp_path / "handled", "ps-bsp", 4, handling, script=large, options=options)
    assert handled_s == pytest.approx(4 * STEP_S + 8 * packed_s, rel=0.1)


def test_messages_queue_for_the_cores_of_one_machine(tmp_path: Path) -> None:
    """A ring of four has six rounds of four messages, 4 ms of a core each: 8 ms a round on two cores, or a little less,
    since who is through first computes already. Four workers compute in turns on two cores."""
    costs = Communication(message_us=5000.0, message_core_us=4000.0)
    alone, together, many = (replace(cluster_of(), communication=costs, shared_cores=cores) for cores in (None, 2, 4))
    ring_s = partial(taken_s, strategy="all-reduce", workers=4, options={"algorithm": "ring"})
    for name, cluster in (("alone", alone), ("many", many)):
        assert ring_s(tmp_path / name, cluster=cluster) == pytest.approx(STEP_S + 6 * 5e-3, rel=0.001)
    assert ring_s(tmp_path / "together", cluster=together) == pytest.approx(2 * STEP_S + 6 * 8e-3, rel=0.1)


def test_requests_queue_for_the_cores_of_one_machine(tmp_path: Path) -> None:
    """Four workers ask four servers, one of them each on its own host, which takes half as much: twelve requests of
    8 ms and four of 4 ms on two cores."""
    cluster = cluster_of(placement="with workers")
    cluster = replace(cluster, communication=Communication(request_core_us=8000.0))
    options = {"servers": 4, **PLAIN}
    assert taken_s(tmp_path / "alone", "ps-bsp", 4, cluster, options=options) == pytest.approx(STEP_S, rel=0.001)
    together = replace(cluster, shared_cores=2)
    found_s = taken_s(tmp_path / "together", "ps-bsp", 4, together, options=options)
    assert found_s == pytest.approx(2 * STEP_S + 12 * 4e-3 + 4 * 2e-3, rel=0.1)


def noting(moments: list[float], worker: Worker, out: Path) -> None:
    """Notes when the gradients of two layers are there, after the forward pass began."""
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 4, bias=False))
    model, optimizer, loader = worker.prepare(model, SGD(model.parameters(), lr=1e-3), loader_of(problem()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: moments.append(worker._session.run.clock.now_s))
    for x, y, _ in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_gradients_are_ready_when_they_were_measured_to_be(tmp_path: Path) -> None:
    moments: list[float] = []
    cluster = cluster_of(backward_share=0.5, gradient_shares=(0.9, 0.1))
    run(partial(noting, moments), tmp_path, "single", 1, cluster=cluster, max_steps=1)
    assert moments == pytest.approx([STEP_S * (0.5 + 0.5 * 0.1), STEP_S])


def test_another_models_shares_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="gradient_shares are of a model with 3 parameters, and this one has 2; probe"):
        run(tiny, tmp_path, "single", 1, cluster=cluster_of(gradient_shares=(0.5, 0.25, 0.25)), max_steps=1)


def test_shares_that_are_no_parts_are_refused() -> None:
    for shares in [(0.5, 0.4), (1.5, -0.5)]:
        with pytest.raises(ValueError, match="gradient_shares must be parts of backward"):
            Compute(step_s=1.0, gradient_shares=shares)


def test_a_forward_pass_that_fails_is_counted_no_further(tmp_path: Path) -> None:
    """What counts operations sees those of the whole process, other runs of it among them."""

    def failing(worker: Worker, out: Path) -> None:
        model = nn.Sequential(nn.Linear(4, 2), nn.Linear(3, 2))
        model, _, loader = worker.prepare(model, SGD(model.parameters(), lr=1e-3), loader_of(problem()))
        for x, *_ in loader:
            model(x[:, :4])

    with pytest.raises(RunFailed, match="shapes cannot be multiplied"):
        run(failing, tmp_path, "all-reduce", 2, cluster=cluster_of())
    assert _get_current_dispatch_mode() is None
