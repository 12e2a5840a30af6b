"""Plans of scripts with tables: what a few batches show of rows, and what these take beside the virtual engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.description import Cluster, Communication, Compute, Hosts, Servers
from paceline.errors import UsageError
from paceline.lab.variant import Variant
from paceline.nn import ShardedEmbedding, read_ahead, read_together
from paceline.planner import StepWork, predict
from paceline.planner.observing import observe
from paceline.planner.row_work import NUM_STEPS, RowWork, WatchedTables
from paceline.planner.search import plan
from paceline.planner.servers import server_exchange
from paceline.planner.setting import Setting
from paceline.planner.wording import answer
from paceline.server.tables.row_optimizers import of_text
from paceline.server.tables.spec import TableSpec
from tests.conformance import virtual_engine
from tests.covering import covering, left_to

BATCH, DIM, NUM_BATCHES = 400, 32, 40


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = ShardedEmbedding(2**40, DIM, optimizer="adagrad:lr=1e-3", name="users")
        self.items = ShardedEmbedding(2**40, DIM, optimizer="sgd", name="items", dtype=torch.bfloat16)
        self.last = nn.Linear(2 * DIM, 1)

    def forward(self, keys: Tensor) -> Tensor:
        both = torch.cat(read_together([(self.users, keys[:, 0]), (self.items, keys[:, 1])]), dim=1)
        return self.last(both) + self.users(keys[:5, 0]).mean()  # five of them once more, by themselves


def batches() -> Tensor:
    """Keys come by Zipf's law."""
    weights = torch.arange(1, 5000).double().reciprocal()
    keys = torch.multinomial(weights, 2 * BATCH * NUM_BATCHES, replacement=True, generator=_generator())
    return keys.view(-1, 2) * 7919


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def train() -> None:
    worker = paceline.init()
    model: Any = Model()
    loader: Any = DataLoader(TensorDataset(batches()), batch_size=BATCH)
    model, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
    for (keys,) in loader:
        optimizer.zero_grad()
        model(keys).square().mean().backward()
        optimizer.step()


def train_ahead() -> None:
    worker = paceline.init()
    model: Any = Model()
    loader: Any = DataLoader(TensorDataset(batches()), batch_size=BATCH)
    model, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
    for (keys,) in read_ahead(loader, lambda batch: [(model.users, batch[0][:, 0]), (model.items, batch[0][:, 1])]):
        optimizer.zero_grad()
        model(keys).square().mean().backward()
        optimizer.step()


@cache
def seen() -> StepWork:
    return observe(train).work


def test_rows_of_the_first_batches_are_counted() -> None:
    rows = seen().rows
    assert rows is not None
    users, items = ([part.unique() for part in batches()[:, side].split(BATCH)[:NUM_STEPS]] for side in (0, 1))
    assert rows.requests == 2
    keys_bytes, rows_bytes = rows.asked_bytes(0)
    num_users, num_items = (sum(map(len, each)) / NUM_STEPS for each in (users, items))
    assert keys_bytes == pytest.approx(8 * (num_users + num_items))
    assert rows_bytes == pytest.approx(4 * DIM * num_users + 2 * DIM * num_items)
    assert rows.sent_bytes == pytest.approx((8 + 4 * DIM) * num_users + (8 + 2 * DIM) * num_items)
    # Adagrad's gradient, and twice the row and its state; the others' gradient in float32, and twice the row.
    assert rows.updated_bytes[0] == pytest.approx(5 * 4 * DIM * num_users + (4 + 2 * 2) * DIM * num_items)
    joint = [len(torch.cat(users[at : at + 2]).unique()) for at in range(NUM_STEPS - 1)]
    assert rows.updated_bytes[1] > rows.updated_bytes[0]
    assert rows.updated_bytes[1] < 5 * 4 * DIM * max(joint) * 2


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=12), staleness=st.integers(0, 5))
def test_copies_are_used_as_a_worker_uses_them(steps: list[set[int]], staleness: int) -> None:
    watched, bought, asked = WatchedTables(), dict[int, int](), list[int]()
    watched.open_tables([TableSpec("users", 10, 2, of_text("sgd"))])
    for step, keys in enumerate(steps):
        watched.read({0: torch.tensor(sorted(keys))}, is_fresh=False)
        watched.end_step()
        new = {key for key in keys if bought.get(key, -9) < step - staleness}
        bought |= dict.fromkeys(new, step)
        asked.append(len(new))
    kept = min(staleness, max(1, len(steps) // 2) - 1)
    if kept == staleness:
        whole = len(steps) // (staleness + 1) * (staleness + 1)
        assert watched.work().asked_bytes(staleness)[0] == pytest.approx(8 * sum(asked[:whole]) / whole)


def test_rows_of_another_batch_grow_as_from_one_to_two() -> None:
    rows = RowWork(1, ((80.0, 160.0),), 240.0, (100.0, 150.0))
    assert rows.of_part(2).updated_bytes[0] == pytest.approx(150.0)
    assert rows.of_part(0.5).sent_bytes == pytest.approx(240 / 1.5)
    # Each of several gradients is read, and added to what is read and written.
    assert [rows.updated_bytes_of(num) for num in (1, 2, 4)] == [100, 150 + 3 * 2 * 240, 250 + 3 * 4 * 240]


def cluster_of(placement: Any) -> Cluster:
    hosts = Hosts(count=8, bandwidth_gbit_per_s=1.0, latency_us=100.0, memory_gbyte_per_s=10.0)
    return Cluster(hosts=(hosts,), compute=Compute(step_s=0.002), servers=Servers(placement=placement))


def free(cluster: Cluster) -> Cluster:
    return cluster


def asking(cluster: Cluster) -> Cluster:
    """Requests about rows take longer than others."""
    said = Communication(request_us=100.0, row_request_us=400.0)
    return replace(cluster, servers=replace(cluster.servers, row_request_us=300.0), communication=said)


def costly(cluster: Cluster) -> Cluster:
    """Requests, and picking rows out of memory, take about as long as the links."""
    hosts = tuple(replace(host, row_gbyte_per_s=0.5) for host in cluster.hosts)
    return replace(
        cluster,
        hosts=hosts,
        servers=replace(cluster.servers, request_us=200.0),
        communication=Communication(request_us=200.0),
    )


def bursting(cluster: Cluster) -> Cluster:
    """Slow cards let a good part of a step's rows pass at once."""
    (hosts,) = cluster.hosts
    costs = replace(cluster.communication, packing_gbyte_per_s=1.0)
    return replace(cluster, hosts=(replace(hosts, bandwidth_gbit_per_s=0.2, burst_kbyte=25.0),), communication=costs)


PLACED = (
    ("ps-bsp:combine=never:servers=2", "separate", 0.08),
    ("all-reduce:servers=2", "with workers", 0.08),
    ("ps-ssp:servers=1:row_staleness=3", "separate", 0.15),
    ("ps-asp:servers=2", "separate", 0.1),
    ("ps-asp:servers=2", "with workers", 0.15),
)
COSTS = ((free, asking), (costly, bursting))


@pytest.mark.parametrize(
    ("costs", "placed"),
    [
        pytest.param(costs, placed, marks=left_to(is_quick=is_chosen, is_chosen=is_chosen))
        for costs, placed, is_chosen in covering(PLACED, COSTS)
    ],
)
def test_the_virtual_engine_takes_as_long(
    placed: tuple[str, str, float], costs: Callable[[Cluster], Cluster], tmp_path: Path
) -> None:
    strategy, placement, tolerance = placed
    cluster = costs(cluster_of(placement))
    chosen = Variant.parse(strategy).strategy
    found = predict(cluster, strategy=chosen, workers=2, work=seen())
    result = virtual_engine.run(train, strategy=strategy, workers=2, out=tmp_path, cluster=cluster, max_steps=28)
    ends_s: dict[int, list[float]] = {}
    for record in result.steps:
        ends_s.setdefault(record.step, []).append(record.time_s)
    took_s = [np.mean(ends_s[step]) - np.mean(ends_s[step - 1]) for step in (5, 6, 7, 9, 10, 11, 12, 13)]
    # Plans add up requests that steps of several workers hide in part: the more these take, the farther off.
    assert found.step_s == pytest.approx(float(np.mean(took_s)), rel=tolerance * (1.2 if costs is asking else 1.0))
    few = replace(seen(), rows=RowWork(2, ((0.0, 0.0),), 0.0, (0.0,)))
    saved_s = found.step_s - predict(cluster, strategy=chosen, workers=2, work=few).step_s
    assert saved_s > (0.00005 if costs is bursting else 0.0003)  # what the rows themselves take is a good part


def test_workers_wait_for_cores_that_hosts_share() -> None:
    """Two of them, which need a core for 2 ms of computing and three requests a step: as a closed queue has it."""
    cluster = asking(cluster_of("with workers"))
    cluster = replace(cluster, communication=replace(cluster.communication, row_request_core_us=500.0))
    alone, shared = (
        predict(each, strategy="ps-asp", workers=2, work=seen(), options={"servers": 2})
        for each in (cluster, replace(cluster, shared_cores=2))
    )
    core_s = 0.002 + 3 * 0.0005
    others_s = (core_s / 2) ** 2 / alone.step_s  # half of it on each core, on which the other is for such a part
    assert shared.step_s - alone.step_s == pytest.approx(others_s, rel=0.2)


def test_asynchronous_workers_meet_where_links_are_asked_for_more_than_they_pass() -> None:
    """Servers on hosts of their own pass what two workers' cards take. On the workers' hosts what one worker is sent
    meets what the other sends."""

    def trips(placement: str, num_workers: int = 2) -> list[tuple[float, float, int]]:
        setting = Setting.of(cluster_of(placement), seen(), num_workers=num_workers, num_servers=2)
        rows = server_exchange(setting, num_gradients=1).rows
        return [(round(trip.use, 3), round(trip.each, 3), trip.meets) for trip in rows.trips]

    for use, each, _ in trips("separate"):
        assert use + each <= 1.001
    assert trips("with workers") == [(1, pytest.approx(1, abs=0.05), 1), (1, pytest.approx(1, abs=0.05), 0)]
    # A third worker's is more than two servers pass.
    assert trips("separate", 3) == [(0.5, 0.5, 0), (0.5, 0.5, 1)]
    assert trips("separate", 1) == []


def test_a_plan_says_that_it_does_not_price_rows_that_are_read_ahead() -> None:
    def says_so(work: StepWork) -> bool:
        found = plan(cluster_of("separate"), work, max_workers=2, num_checks=0)
        return "reads rows ahead" in " ".join(answer(found))

    assert not says_so(seen())
    assert says_so(observe(train_ahead).work)


def test_strategies_without_a_place_for_rows_are_left_out() -> None:
    found = plan(cluster_of("separate"), seen(), max_workers=2, num_checks=0)
    assert {"gossip", "all-reduce"} <= set(found.unpriced)
    assert {"ps-bsp", "ps-ssp", "ps-asp", "all-reduce:servers=1", "single"} <= {point.asked for point in found.points}
    with pytest.raises(UsageError, match="gossip has no place for the rows"):
        predict(cluster_of("separate"), strategy="gossip", workers=2, work=seen())
    plain = StepWork(tensor_bytes=(4000,), samples=1)
    with pytest.raises(UsageError, match="rows of a ShardedEmbedding alone, of which the model has none"):
        predict(cluster_of("separate"), strategy="all-reduce", workers=2, work=plain, options={"servers": 1})
