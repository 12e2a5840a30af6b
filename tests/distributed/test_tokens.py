"""Clusters are joined with their token; one that asks for none, only if that is said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray._raylet import AuthenticationMode, get_authentication_mode
from ray.cluster_utils import Cluster

from paceline import RunFailed, UsageError
from paceline.engines.ray.nodes import connected, nodes
from paceline.engines.ray.tokens import own_token

pytestmark = pytest.mark.ray
VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user who has none."""
    ray.shutdown()  # the Ray of earlier modules: a process has one at a time
    for name in VARIABLES:
        # Not to be put back: a Ray without a token, started here, sets the mode of the process. With the mode of
        # another Ray, which this process has forgotten by then, the next module's Ray would not know its own.
        os.environ.pop(name, None)
    monkeypatch.setenv("HOME", str(tmp_path))


@contextmanager
def cluster() -> Iterator[str]:
    started = Cluster(head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000})
    started.add_node(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000)
    try:
        yield str(started.address)
    finally:
        started.shutdown()


def join(address: str, *, insecure: bool = False) -> None:
    with connected(address, insecure=insecure):
        assert nodes()


def test_a_cluster_with_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with own_token(), cluster() as address, monkeypatch.context() as changed:
        join(address)
        token = os.environ["RAY_AUTH_TOKEN"]
        changed.setenv("RAY_AUTH_TOKEN", "0" * 64)
        with pytest.raises(UsageError, match=r"here is another, in the variable RAY_AUTH_TOKEN; bring"):
            join(address)
        changed.delenv("RAY_AUTH_TOKEN")
        with pytest.raises(UsageError, match=r"here is none, in the file ~/\.ray/auth_token; bring"):
            join(address, insecure=True)
        (tmp_path / "mine").write_text("0" * 64)
        changed.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "mine"))
        with pytest.raises(UsageError, match=r"here is another, in the file /.*mine that RAY_AUTH_TOKEN_PATH names"):
            join(address)
        changed.delenv("RAY_AUTH_TOKEN_PATH")
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(token)
        join(address)


def test_a_cluster_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster() as address:
        for token in (None, "0" * 64):
            with monkeypatch.context() as changed:
                if token is not None:
                    changed.setenv("RAY_AUTH_TOKEN", token)
                with pytest.raises(UsageError, match=r"asks for no token.*--insecure"):
                    join(address)
                join(address, insecure=True)
        with connected(address, insecure=True):
            other = f"{nodes()[0].address}:{nodes()[0].port}"
        with pytest.raises(RunFailed, match="no cluster answers there"):  # Ray's too, but not the cluster
            join(other)
        # The same of a connection that the process has.
        ray.init(address, log_to_driver=False, logging_level="ERROR")
        with pytest.raises(UsageError, match="asks for no token"):
            join(address)
        join(address, insecure=True)
        ray.shutdown()


def test_a_ray_of_ones_own_has_a_token_of_its_own() -> None:
    tokens = []
    for _ in range(2):
        with own_token():
            tokens.append(os.environ["RAY_AUTH_TOKEN"])
            assert get_authentication_mode() == AuthenticationMode.TOKEN
    assert len(set(tokens)) == 2
    assert min(map(len, tokens)) == 64
    assert get_authentication_mode() == AuthenticationMode.DISABLED
    assert not os.environ.keys() & set(VARIABLES)
