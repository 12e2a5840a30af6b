"""What becomes of a connection to a cluster whose client server fails as it begins."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import ray

from paceline.engines.ray.nodes import connected
from paceline.errors import RunFailed

DIED = "Initialization failure from server"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Somebody listens there; whether Ray's client server begins is up to `ray.init`."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr("paceline.engines.ray.nodes.users_token", lambda *_arguments, **_options: nullcontext())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"ray://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(("failures", "connects"), [(2, True), (3, False)])
def test_a_client_server_that_dies_is_asked_again(
    address: str, monkeypatch: pytest.MonkeyPatch, failures: int, connects: bool
) -> None:
    left = [ConnectionAbortedError(DIED)] * failures

    def init(**_options: object) -> None:
        if left:
            raise left.pop()

    monkeypatch.setattr(ray, "init", init)
    if connects:
        with connected(address, insecure=True):
            assert not left
    else:
        with pytest.raises(RunFailed, match=DIED), connected(address, insecure=True):
            pass
