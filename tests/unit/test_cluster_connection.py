"""What becomes of a connection to a cluster whose client server fails as it begins."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import services
from ray._private.parameter import RayParams

from paceline.comm.hosts import own_ip_address
from paceline.engines.ray import allocated_node
from paceline.engines.ray.local_start import start_local
from paceline.engines.ray.nodes import connected
from paceline.errors import RunFailed, UsageError

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


@pytest.mark.parametrize(
    ("named", "connects"),
    [
        ("127.0.0.1:7399", True),
        ("localhost:7399", True),
        ("{own}:7399", True),
        ("127.0.0.1:7400", False),
        ("192.0.2.99:7399", False),
    ],
)
@pytest.mark.parametrize("is_here", [True, False])
def test_the_loopback_names_a_cluster_of_this_host_alone(
    monkeypatch: pytest.MonkeyPatch, named: str, connects: bool, is_here: bool
) -> None:
    """Ray that was named so tells its address on the network."""
    own = own_ip_address() if is_here else "203.0.113.7"
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr("paceline.engines.ray.nodes.connected_to", lambda: f"{own}:7399")
    is_loopback = not named.startswith("{own}")
    if connects and (is_here or not is_loopback):
        with connected(named.format(own=own), insecure=True):
            pass
    else:
        with pytest.raises(UsageError, match="this process is connected to Ray at"), connected(named, insecure=True):
            pass


@pytest.mark.parametrize("failures", [1, 2])
def test_a_ray_that_is_late_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: int
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def init(**options: object) -> None:
        assert all(process.poll() is not None for process in started), "what failed is still there"
        directory = str(options["_temp_dir"])
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", directory]))
        if len(started) <= failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    try:
        with (
            nullcontext()
            if failures == 1
            else pytest.raises(TimeoutError, match=r"more than the 15 s.*the machine is busy")
        ):
            start_local(tmp_path, {})
        assert len(started) == 2
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_ray_that_fails_otherwise_is_not_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init(**options: object) -> None:
        assert not tried
        tried.append(True)
        raise ValueError("no such option")

    tried: list[bool] = []
    monkeypatch.setattr(ray, "init", init)
    before = RayParams.update_if_absent, services.start_api_server
    with pytest.raises(ValueError, match="no such option"):
        start_local(tmp_path, {})
    assert (RayParams.update_if_absent, services.start_api_server) == before


def test_a_ray_leaves_out_what_no_run_asks_while_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = RayParams.update_if_absent, services.start_api_server
    started = []

    def init(**_: object) -> None:
        params = RayParams()
        params.update_if_absent(resources={})
        assert params.include_log_monitor is None  # as of who looks for a node
        params.update_if_absent(include_log_monitor=True, setup_worker_path="rays_own.py", worker_path="worker.py")
        assert (params.no_monitor, params.include_log_monitor) == (True, False)
        assert (params.setup_worker_path, params.worker_path) == ("ours.py", "worker.py")
        assert services.start_api_server(False, raise_on_failure=True) == (None, None)
        started.append(True)

    monkeypatch.setattr(ray, "init", init)
    start_local(tmp_path, {"setup_worker_path": "ours.py"})
    assert started
    assert (RayParams.update_if_absent, services.start_api_server) == before


def test_a_ray_that_starts_looks_for_its_object_store_often_and_for_as_long_as_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: dict[str, Any] = {}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", lambda **options: started.update(options))
    with connected(None, num_workers=1):
        pass
    of_job = next(
        word for word in allocated_node.head("127.0.0.1", 1, tmp_path, 2) if word.startswith("--system-config")
    )
    for settings in (started["_system_config"], json.loads(of_job.partition("=")[2])):
        every_ms = settings["raylet_client_connect_timeout_milliseconds"]
        assert every_ms <= 50
        assert every_ms * settings["raylet_client_num_connect_attempts"] == 10_000
