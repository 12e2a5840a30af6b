"""Who is heard: members of this run's epoch with this run's keys, and nobody else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from paceline.comm.servers.service import ParameterService
from paceline.comm.wire import Caller, Keys
from paceline.engines.ray.controller import Controller
from paceline.messages import Kind, Message
from paceline.records import NullReporter
from tests.distributed.harness import events

EPOCH = 3
HOST = "127.0.0.1"
WITHIN_S = 60.0


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = Controller(tmp_path, host=HOST, epoch=EPOCH, on_output=lambda who, line: None)
    yield controller
    controller.close()


@pytest.fixture
def service_keys() -> Keys:
    return Keys.generate()


@pytest.fixture
def service(service_keys: Keys) -> Iterator[ParameterService]:
    service = ParameterService(service_keys, host=HOST, index=0, epoch=EPOCH, reporter=NullReporter())
    thread = threading.Thread(target=service.serve)
    thread.start()
    yield service
    service.stop()
    thread.join()


def ask(keys: Keys, endpoint: str, message: Message, *, timeout_s: float = 60.0) -> Message | None:
    """What is answered, if anything is."""
    caller = Caller(keys, endpoint=endpoint, identity="worker-0")
    try:
        caller.send(message)
        if not caller.socket.poll(int(timeout_s * 1000), zmq.POLLIN):
            return None
        return Message.decode(caller.receive() or [], epoch=EPOCH)
    finally:
        caller.close()


def listen(controller: Controller, *, for_s: float, until: Callable[[], Any] = lambda: False) -> None:
    until_s = time.monotonic() + for_s
    while not until() and time.monotonic() < until_s:
        controller.turn(timeout_s=0.05)


def test_server_answers_its_own_epoch_and_refuses_another(service: ParameterService, service_keys: Keys) -> None:
    present = ask(service_keys, service.endpoint, Message(Kind.PULL, EPOCH))
    stale = ask(service_keys, service.endpoint, Message(Kind.PULL, EPOCH - 1))
    assert present is not None
    assert "refused PULL from worker 0" in present.body["error"]  # it has not attached
    assert stale is not None
    assert stale.kind is Kind.ERROR
    assert f"refused a message of membership epoch {EPOCH - 1}; this is epoch {EPOCH}" in stale.body["error"]


def test_server_refuses_one_worker_in_anothers_name(service: ParameterService, service_keys: Keys) -> None:
    answer = ask(service_keys, service.endpoint, Message(Kind.PULL, EPOCH, sender=1))
    assert answer is not None
    assert "refused a message for worker 1 from b'worker-0'" in answer.body["error"]


def test_stranger_on_a_servers_port_gets_nothing(service: ParameterService, service_keys: Keys) -> None:
    own = zmq.curve_keypair()
    stranger = Keys(service_keys.server_public, b"", *own)
    assert ask(stranger, service.endpoint, Message(Kind.PULL, EPOCH), timeout_s=1.0) is None
    host, port = service.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=1.0) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
        heard = b""
        try:
            while chunk := raw.recv(1000):
                heard += chunk
        except (TimeoutError, ConnectionResetError):
            pass
    assert len(heard) <= 64, "no more than ZeroMQ's greeting"
    assert ask(service_keys, service.endpoint, Message(Kind.PULL, EPOCH)) is not None, "it still serves its own"


def test_launcher_refuses_a_stale_epoch(controller: Controller, tmp_path: Path) -> None:
    address = controller.address
    caller = Caller(address.keys, endpoint=address.endpoint, identity="worker-0")
    caller.send(Message(Kind.PULSE, EPOCH - 1, iteration=7))
    listen(controller, for_s=WITHIN_S, until=lambda: events(tmp_path))
    assert controller.num_steps == {}
    caller.send(Message(Kind.PULSE, EPOCH, iteration=8, body={"awaits_others": False, "epoch": 0}))
    listen(controller, for_s=WITHIN_S, until=lambda: controller.num_steps)
    caller.close()
    assert controller.num_steps == {"worker-0": 8}
    assert [event["name"] for event in events(tmp_path)] == ["refused"]
    assert f"epoch {EPOCH - 1}" in events(tmp_path)[0]["details"]["error"]


def test_launcher_does_not_hear_a_stranger(controller: Controller, tmp_path: Path) -> None:
    address = controller.address
    stranger = Keys(address.keys.server_public, b"", *zmq.curve_keypair())
    caller = Caller(stranger, endpoint=address.endpoint, identity="worker-0")
    caller.send(Message(Kind.PULSE, EPOCH, iteration=8, body={"awaits_others": False, "epoch": 0}))
    listen(controller, for_s=1.0)
    caller.close()
    assert controller.num_steps == {}


@pytest.mark.parametrize("name", ["../evil", "/tmp/paceline-evil", "manifest.json", "checkpoint.pt/x"])
def test_members_write_only_files_of_a_run(controller: Controller, tmp_path: Path, name: str) -> None:
    address = controller.address
    caller = Caller(address.keys, endpoint=address.endpoint, identity="worker-0")
    before = set(tmp_path.parent.rglob("*"))
    caller.send(Message(Kind.FILE, EPOCH, body={"name": name}, payload=[b"content"]))
    listen(controller, for_s=WITHIN_S, until=lambda: caller.socket.poll(0))
    answer = Message.decode(caller.receive() or [], epoch=EPOCH)
    caller.close()
    assert answer.kind is Kind.FILE_WRITTEN
    assert "refused to write" in answer.body["error"]
    assert set(tmp_path.parent.rglob("*")) == before
    assert not Path("/tmp/paceline-evil").exists()
