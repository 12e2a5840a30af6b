"""Which node gets which process: a pure function of the nodes' resources."""

from __future__ import annotations

import socket
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.ray.nodes import Node, Place, answering, least_loaded, place
from paceline.engines.ray.placing import place_in_bundles
from paceline.errors import UsageError

cores = st.sampled_from([0.0, 1.0, 2.0, 4.0, 16.0, 64.0])
hosts = st.lists(st.tuples(cores, st.sampled_from([0.0, 1.0, 8.0])), min_size=1, max_size=5).map(
    lambda sizes: [Node(f"node-{index}", "10.0.0.1", cpus, gpus) for index, (cpus, gpus) in enumerate(sizes)]
)
with_cores = hosts.filter(lambda nodes: any(node.num_cpus for node in nodes))


def load(places: list[Place], node: Node) -> int:
    return sum(where.node == node for where in places)


@given(with_cores, st.integers(1, 40), st.integers(0, 8))
def test_every_process_has_a_place_and_no_node_is_overcommitted(
    nodes: list[Node], num_workers: int, num_servers: int
) -> None:
    workers, servers = place(nodes, num_workers=num_workers, num_servers=num_servers, wants_gpus=False)
    assert len(workers) == num_workers
    assert len(servers) == num_servers
    for node in nodes:
        here = [where for where in workers + servers if where.node == node]
        assert sum(where.num_cpus for where in here) <= node.num_cpus + 1e-9
        assert all(0 < where.num_cpus <= 1 for where in here)
        assert all(where.num_cpus * 1e4 == pytest.approx(round(where.num_cpus * 1e4)) for where in here)
        assert all(where.num_gpus == 0 for where in here)


@given(with_cores, st.integers(1, 40))
def test_workers_spread_in_proportion_to_cores(nodes: list[Node], num_workers: int) -> None:
    workers, _ = place(nodes, num_workers=num_workers, num_servers=0, wants_gpus=False)
    for node in nodes:
        if node.num_cpus:
            # Moving one worker from here to any other node would not even the loads.
            here = load(workers, node) / node.num_cpus
            others = [(load(workers, other) + 1) / other.num_cpus for other in nodes if other.num_cpus]
            assert here <= min(others) + 1e-9 or load(workers, node) == 0
        else:
            assert load(workers, node) == 0


@given(with_cores, st.integers(1, 40))
def test_ranks_run_host_by_host(nodes: list[Node], num_workers: int) -> None:
    workers, _ = place(nodes, num_workers=num_workers, num_servers=0, wants_gpus=False)
    order = [nodes.index(where.node) for where in workers]
    assert order == sorted(order)


@given(hosts, st.integers(1, 20))
def test_workers_that_want_gpus_share_those_there_are(nodes: list[Node], num_workers: int) -> None:
    if not any(node.num_gpus for node in nodes):
        with pytest.raises(UsageError, match="no node of the cluster has a GPU"):
            place(nodes, num_workers=num_workers, num_servers=0, wants_gpus=True)
        return
    workers, _ = place(nodes, num_workers=num_workers, num_servers=0, wants_gpus=True)
    for node in nodes:
        here = [where for where in workers if where.node == node]
        assert sum(where.num_gpus for where in here) <= node.num_gpus + 1e-9
        assert all(0 < where.num_gpus <= 1 for where in here)
        assert all(where.num_cpus <= 1 for where in here)


def test_equal_nodes_take_turns() -> None:
    nodes = [Node("a", "10.0.0.1", 2.0, 0.0), Node("b", "10.0.0.2", 2.0, 0.0)]
    workers, servers = place(nodes, num_workers=3, num_servers=2, wants_gpus=False)
    assert [where.node.node_id for where in workers] == ["a", "a", "b"]
    assert [where.node.node_id for where in servers] == ["a", "b"]
    assert [where.num_cpus for where in workers] == [0.6666, 0.6666, 1.0]


def test_no_cores_at_all() -> None:
    with pytest.raises(UsageError, match="no node of the cluster has a core"):
        place([Node("a", "10.0.0.1", 0.0, 0.0)], num_workers=1, num_servers=0, wants_gpus=False)


bundles = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 1.0]))).map(
    lambda drawn: [
        Place(Node(f"node-{node}", "10.0.0.1", 8.0, 8.0), cpus, gpus, bundle=index)
        for index, (node, cpus, gpus) in enumerate(drawn)
    ]
)


@given(bundles, st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_in_a_placement_group_each_process_has_one_of_the_last_bundles(
    group: list[Place], num_workers: int, num_servers: int, wants_gpus: bool
) -> None:
    number = num_workers + num_servers
    last = group[len(group) - number :] if len(group) >= number else []
    asked = partial(
        place_in_bundles, num_workers=num_workers, num_servers=num_servers, wants_gpus=wants_gpus, own="node-1"
    )
    if not last or (wants_gpus and sum(where.num_gpus for where in last) < num_workers):
        with pytest.raises(UsageError, match="bundle"):
            asked(group)
        return
    workers, servers = asked(group)
    assert sorted(where.bundle or 0 for where in workers + servers) == [where.bundle or 0 for where in last]
    for where in workers:
        shared = [other.num_cpus for other in workers if other.node == where.node]
        assert where.host_cores == max(1, int(sum(shared)))
        assert where.num_gpus or not wants_gpus
    order = [(where.node.node_id != "node-1", where.node.node_id) for where in workers]
    assert order == sorted(order)


@given(with_cores, st.integers(1, 40))
def test_workers_that_come_one_by_one_are_spread_as_if_they_had_begun(nodes: list[Node], num_workers: int) -> None:
    there: Counter[str] = Counter()
    for _ in range(num_workers):
        there[least_loaded(nodes, there, doubtful=()).node_id] += 1
    workers, _ = place(nodes, num_workers=num_workers, num_servers=0, wants_gpus=False)
    assert there == Counter(where.node.node_id for where in workers)


@given(with_cores, st.integers(1, 5))
def test_whoever_may_be_cut_off_gets_a_worker_where_nobody_else_can(nodes: list[Node], num_doubtful: int) -> None:
    doubtful = {node.node_id for node in nodes[:num_doubtful]}
    crowd = {node.node_id: 100 for node in nodes[num_doubtful:]}
    found = least_loaded(nodes, crowd, doubtful=doubtful)
    assert found.num_cpus > 0
    assert (found.node_id in doubtful) == all(node.node_id in doubtful for node in nodes if node.num_cpus > 0)


def test_a_host_that_answers_is_told_from_one_that_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = Node("a", "127.0.0.1", 1.0, 0.0, server.getsockname()[1])
        assert node.answers
    assert not node.answers


def test_hosts_that_do_not_answer_are_left_out_and_named() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = Node("a", "127.0.0.1", 1.0, 0.0, server.getsockname()[1])
        gone = Node("b", "127.0.0.2", 1.0, 0.0, server.getsockname()[1])
        assert answering([there, gone], said.append) == [there]
        assert said == ["the host at 127.0.0.2 does not answer, and gets no process; Ray still lists it"]
    assert answering([there, gone], said.append) == [there, gone]  # as from where no host can be reached
    assert len(said) == 1
