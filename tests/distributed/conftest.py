"""What tests that start workers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.namespaces import Network
from tests.distributed.harness import Command, starting
from tests.distributed.own_network import own_network


@pytest.fixture
def hosts(program_forks: str) -> Iterator[Network]:
    with own_network(3, program_forks) as net:
        yield net


@pytest.fixture(scope="module")
def cluster(program_forks: str) -> Iterator[str]:
    """A Ray cluster that outlives the commands; most of a short command is else the start of one."""
    from ray.cluster_utils import Cluster

    from paceline.engines.ray.tokens import own_token

    node = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80_000_000}
    with own_token():
        cluster = Cluster(initialize_head=True, head_node_args=node)
        yield cluster.address
        cluster.shutdown()


@pytest.fixture
def start(tmp_path: Path, program_forks: str) -> Iterator[Callable[..., Command]]:
    """Starts `paceline` (or another program) with arguments; whatever is left of it is ended after the test."""
    with starting(tmp_path) as started:
        yield started


@pytest.fixture
def start_on_cluster(start: Callable[..., Command], cluster: str) -> Callable[..., Command]:
    """As `start`, for commands whose own Ray would show nothing more: it takes longer to start than most of them."""
    return partial(start, RAY_ADDRESS=cluster)


@pytest.fixture
def on_cluster(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for whatever the test starts."""
    monkeypatch.setenv("RAY_ADDRESS", cluster)
