"""Worlds of real processes for the tests of collectives."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import astuple
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from paceline.comm.segment import SegmentAddress
from paceline.comm.shared_memory import SharedMemoryCollective
from paceline.comm.torch_distributed import connect_gloo
from tests.forks import FORKS

ANSWER_WITHIN_S = 30.0
MEETING_S = 30.0


class RankFailed(Exception):
    """A rank raised; the message holds its traceback."""


class World:
    """Some processes with a collective each, which run functions of the tests."""

    def __init__(self, backend: str, size: int, *, deadline_s: float | None = 20.0) -> None:
        self.size = size
        self.backend = backend
        self._deadline_s = deadline_s
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(collective, *arguments)` on every rank; the results in rank order.

        After an error the processes are replaced by new ones, so that the next call finds a working collective.

        Raises:
            RankFailed: a rank raised, or did not answer.
        """
        self.start(function, *arguments)
        try:
            return [self.result(rank) for rank in range(self.size)]
        except RankFailed:
            self.close()
            raise

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start `function` on every rank."""
        if not self._processes:
            self._open()
        for connection in self._connections:
            connection.send_bytes(_encode((function, arguments)))

    def result(self, rank: int, *, within_s: float = ANSWER_WITHIN_S) -> Any:
        """What the started function returned on one rank."""
        return _receive(self._connections[rank], f"rank {rank}", within_s=within_s)

    def kill(self, rank: int) -> float:
        """End a rank as the kernel would; the time at which that was asked for."""
        os.kill(self._processes[rank].pid, signal.SIGKILL)
        return time.time()

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(0.5 if process.is_alive() else None)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        port = _free_port()
        for rank in range(self.size):
            ours, theirs = FORKS.Pipe()
            arguments = (self.backend, rank, self.size, self._deadline_s, port, theirs)
            process = FORKS.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        addresses = [_receive(connection, f"start of rank {rank}") for rank, connection in enumerate(self._connections)]
        for connection in self._connections:
            connection.send_bytes(_encode(addresses))


def _encode(value: Any) -> bytes:
    """By torch.save: multiprocessing moves tensors through shared memory files, and pickle knows not all dtypes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _decode(raw: bytes) -> Any:
    return torch.load(io.BytesIO(raw), weights_only=False)


def _receive(connection: Connection, what: str, *, within_s: float = ANSWER_WITHIN_S) -> Any:
    if not connection.poll(within_s):
        raise RankFailed(f"no answer within {within_s} s from {what}")
    try:
        succeeded, value = _decode(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        raise RankFailed(f"process ended: {what}") from None
    if not succeeded:
        raise RankFailed(f"{what}: {value}")
    return value


def _serve(backend: str, rank: int, size: int, deadline_s: float | None, port: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    collective = _join(backend, rank, size, deadline_s, port, connection)
    try:
        while True:
            function, arguments = _decode(connection.recv_bytes())
            connection.send_bytes(_encode(_answer(function, collective, arguments)))
    except (EOFError, OSError):
        collective.close()
    # Past gloo's threads, which may still hold on to a broken connection.
    os._exit(0)


def _answer(function: Callable[..., Any], collective: Collective, arguments: Sequence[Any]) -> tuple[bool, Any]:
    try:
        return True, function(collective, *arguments)
    except BaseException:
        return False, traceback.format_exc()


def _join(
    backend: str, rank: int, size: int, deadline_s: float | None, port: int, connection: Connection
) -> Collective:
    """Ranks may be slow to meet on a busy machine; the deadline that a test wants counts from then on."""
    collective = _meet(backend, rank, size, port, connection)
    collective.set_deadline(deadline_s)
    return collective


def _meet(backend: str, rank: int, size: int, port: int, connection: Connection) -> Collective:
    control = SharedMemoryCollective.prepare()
    connection.send_bytes(_encode((True, astuple(control.address))))
    addresses = [SegmentAddress(*numbers) for numbers in _decode(connection.recv_bytes())]
    if backend == "alone":
        return AloneCollective()
    if backend == "shared_memory":
        return SharedMemoryCollective(rank=rank, addresses=addresses, control=control, deadline_s=MEETING_S)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=20))
    return connect_gloo(store, rank=rank, size=size, address="127.0.0.1", deadline_s=MEETING_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def caught(function: Callable[[], Any]) -> tuple[str, str, float]:
    """Name and message of what `function` raises (empty where it raises nothing), and when it did."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), time.time()
    return "", "", time.time()


def later(delay_s: float, function: Callable[..., Any], *arguments: Any) -> threading.Timer:
    """Call from another thread after a while."""
    timer = threading.Timer(delay_s, function, arguments)
    timer.start()
    return timer


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_files(pid: int) -> Sequence[str]:
    """Paths of all files that a process maps."""
    with open(f"/proc/{pid}/maps") as maps:
        return sorted({fields[5].strip() for line in maps if len(fields := line.split(None, 5)) == 6})
