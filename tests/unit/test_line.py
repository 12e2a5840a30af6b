"""The line between a worker and a server of one host."""

from __future__ import annotations

import fcntl
import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.comm.servers.line import Bell, BellAddress, ServerLine, WorkerLine
from paceline.comm.shared_memory.block import SharedBlock
from paceline.errors import PeerLost


@pytest.fixture
def bell() -> Iterator[Bell]:
    bell = Bell()
    yield bell
    bell.close()


def is_ringing(bell: Bell, timeout_s: float = 0.0) -> bool:
    return bool(select.select([bell.fd], [], [], timeout_s)[0])


def test_a_request_rings_and_is_answered(bell: Bell) -> None:
    worker = WorkerLine(bell.address)
    server = ServerLine(worker.address)
    assert server.receive() is None
    assert worker.send([b"header", b"body"])
    assert is_ringing(bell)
    bell.silence()
    assert not is_ringing(bell)
    assert server.receive() == [b"header", b"body"]
    assert server.receive() is None
    assert worker.receive(timeout_s=0.01) is None
    server.send([b"answer", b""])
    assert not worker.is_answered
    assert worker.receive(timeout_s=0.01) == [b"answer", b""]
    assert worker.is_answered
    worker.send([b"header", b"body"])
    assert not worker.is_answered
    worker.close()
    server.close()


def test_a_late_answer_wakes_the_worker(bell: Bell) -> None:
    worker = WorkerLine(bell.address)
    server = ServerLine(worker.address)
    worker.send([b"ask", b""])
    server.receive()
    answering = threading.Timer(0.1, lambda: server.send([b"answer", b""]))
    answering.start()
    began_s = time.monotonic()
    assert worker.receive(timeout_s=60) == [b"answer", b""]
    assert time.monotonic() - began_s < 30
    answering.join()
    worker.close()
    server.close()


def test_answers_belong_to_their_requests(bell: Bell) -> None:
    worker = WorkerLine(bell.address)
    server = ServerLine(worker.address)
    for number in range(1000):
        worker.send([b"%d" % number, b"x" * number])
        assert server.receive() == [b"%d" % number, b"x" * number]
        server.send([b"%d" % number, b""])
        assert worker.receive(timeout_s=60) == [b"%d" % number, b""]
    worker.close()
    server.close()


def test_a_request_too_large_is_left_to_the_socket(bell: Bell) -> None:
    worker = WorkerLine(bell.address)
    assert not worker.send([b"header", bytes(100_000)])
    assert not is_ringing(bell)
    server = ServerLine(worker.address)
    with pytest.raises(ValueError, match="does not fit"):
        server.send([b"header", bytes(100_000)])
    worker.close()
    server.close()


def test_rings_that_nobody_hears_do_not_block(bell: Bell) -> None:
    worker = WorkerLine(bell.address)
    for _ in range(100_000):
        worker.send([b"ask", b""])
    assert is_ringing(bell)
    bell.silence()
    assert not is_ringing(bell)
    worker.close()


def test_a_server_that_is_gone_is_named(bell: Bell) -> None:
    with pytest.raises(PeerLost, match="process 4194305"):
        WorkerLine(BellAddress(4194305, 3, 5))
    gone = Bell()
    worker = WorkerLine(gone.address)
    gone.close()
    with pytest.raises(PeerLost, match="gone"):
        worker.send([b"ask", b""])
    worker.close()


def test_tensors_of_any_size_go_both_ways(bell: Bell) -> None:
    worker = WorkerLine(bell.address)
    server = ServerLine(worker.address)
    for num_bytes in (0, 5, 100_000, 3, 3_000_000, 0):
        raw = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
        assert worker.send([b"push", b"", raw[: num_bytes // 2], raw[num_bytes // 2 :]])
        assert b"".join(server.receive()[2:]) == raw
        server.send([b"rows", b"", raw[::-1]])
        assert b"".join(worker.receive(timeout_s=60)[2:]) == raw[::-1]
    worker.close()
    server.close()


def test_tensors_that_cannot_be_had_are_named_and_the_line_goes_on(bell: Bell, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerLine(bell.address)
    server = ServerLine(worker.address)
    numbers = worker._segment.buffer[:128].cast("q")
    fd = os.memfd_create("paceline-0000000000000001", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2**62)
    for address, complaint in (
        ((os.getpid(), fd, 2**62, 1), "is not sealed"),
        ((os.getpid(), fd, 2**62, 1), "cannot map"),
        ((os.getpid(), 2**20, 100, 1), "cannot open"),
        ((os.getpid(), fd, 3, 1), "announced 7 bytes in a block of 3"),
    ):
        worker.send([b"push", b"", b"tensors"])
        for place, number in enumerate(address, 2):
            numbers[place] = number
        with pytest.raises(PeerLost, match=complaint):
            server.receive()
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        server.send([b"refused", b""])
        assert worker.receive(timeout_s=60) == [b"refused", b""]
    os.close(fd)
    monkeypatch.setattr(SharedBlock, "create", _no_memory)
    with pytest.raises(OSError, match="memory"):
        worker.send([b"push", b"", bytes(100)])
    monkeypatch.undo()
    worker.send([b"push", b"", bytes(100)])
    assert b"".join(server.receive()[2:]) == bytes(100)
    numbers.release()
    worker.close()
    server.close()


def _no_memory(num_bytes: int) -> SharedBlock:
    raise OSError("no memory")


def test_blocks_cannot_shrink() -> None:
    block = SharedBlock.create(10_000)
    with pytest.raises(PermissionError):
        os.ftruncate(block.address.fd, 1)
    block.close()


def test_a_request_whose_worker_has_gone_is_refused(bell: Bell) -> None:
    worker = WorkerLine(bell.address)
    server = ServerLine(worker.address)
    worker.send([b"push", b"", b"tensors"])
    worker.close()
    with pytest.raises(PeerLost):
        server.receive()
    server.close()
