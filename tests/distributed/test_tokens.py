"""Clusters are joined with their token; one that asks for none, only if that is said."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._raylet import AuthenticationMode, get_authentication_mode
from ray.cluster_utils import Cluster

from paceline import UsageError
from paceline.engines.ray.nodes import connected, nodes
from paceline.engines.ray.tokens import own_token, users_token

pytestmark = pytest.mark.ray
VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user who has none."""
    ray.shutdown()  # the Ray of earlier modules: a process has one at a time
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@contextmanager
def cluster(*, by_client: bool = False) -> Iterator[str]:
    """`by_client`: the address of the server of Ray's client."""
    client: dict[str, Any] = {"ray_client_server_port": free_port()} if by_client else {}
    settings = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000}
    started = Cluster(head_node_args={**settings, **client})
    started.add_node(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000)
    try:
        yield f"ray://127.0.0.1:{client['ray_client_server_port']}" if by_client else str(started.address)
    finally:
        started.shutdown()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def join(address: str, *, insecure: bool = False) -> None:
    with connected(address, insecure=insecure):
        assert nodes()


def test_a_cluster_with_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with own_token(), cluster() as address, monkeypatch.context() as changed:
        join(address)
        token = os.environ["RAY_AUTH_TOKEN"]
        changed.setenv("RAY_AUTH_TOKEN", "0" * 64)
        with pytest.raises(UsageError, match="here is another"):
            join(address)
        changed.delenv("RAY_AUTH_TOKEN")
        with pytest.raises(UsageError, match="here is none"):
            join(address, insecure=True)
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
        # The same of a connection that the process has.
        ray.init(address, log_to_driver=False, logging_level="ERROR")
        with pytest.raises(UsageError, match="asks for no token"):
            join(address)
        join(address, insecure=True)
        ray.shutdown()


@pytest.mark.slow
def test_a_cluster_by_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address of Ray's client, `ray://`: its server says whether it wants a token."""
    pytest.importorskip("grpc", reason="Ray's client needs it")
    with cluster(by_client=True) as address:
        with pytest.raises(UsageError, match=r"asks for no token.*--insecure"), users_token(address, insecure=False):
            pass
        with users_token(address, insecure=True):
            pass
    with own_token(), cluster(by_client=True) as address, monkeypatch.context() as changed:
        join(address)
        changed.setenv("RAY_AUTH_TOKEN", "0" * 64)
        with pytest.raises(UsageError, match="here is another"), users_token(address, insecure=True):
            pass
        changed.delenv("RAY_AUTH_TOKEN")
        with pytest.raises(UsageError, match="here is none"), users_token(address, insecure=True):
            pass


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
