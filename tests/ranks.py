"""Processes of a world, one a rank, that run functions of the tests."""

from __future__ import annotations

import io
import os
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch

from tests.forks import FORKS

ANSWER_WITHIN_S = 300.0


class RankFailed(Exception):
    """A rank raised; the message holds its traceback."""


class Ranks(ABC):
    """`size` processes that are forked when they are first asked for something, and anew after an error."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    @abstractmethod
    def open(self) -> None:
        """`fork` every rank, and `tell` it what it must know to meet the others."""

    def fork(self, target: Callable[..., None], *arguments: Any) -> Connection:
        """One more rank: `target(*arguments, connection)` in a process of its own."""
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._connections.append(ours)
        return ours

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The function on every rank; the results in rank order.

        After an error the processes are replaced by new ones, so that the next call finds a working world.

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
        """Start the function on every rank."""
        if not self._processes:
            self.open()
        for connection in self._connections:
            tell(connection, (function, arguments))

    def result(self, rank: int, *, within_s: float = ANSWER_WITHIN_S) -> Any:
        """What the started function returned on one rank."""
        return hear(self._connections[rank], f"rank {rank}", within_s=within_s)

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
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def tell(connection: Connection, value: Any) -> None:
    """By torch.save: multiprocessing moves tensors through shared memory files, and pickle knows not all dtypes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    connection.send_bytes(buffer.getvalue())


def hear(connection: Connection, what: str, *, within_s: float = ANSWER_WITHIN_S) -> Any:
    """A rank's answer.

    Raises:
        RankFailed: it raised, ended, or is late.
    """
    if not connection.poll(within_s):
        raise RankFailed(f"no answer within {within_s} s from {what}")
    try:
        succeeded, value = read(connection)
    except (EOFError, ConnectionResetError):
        raise RankFailed(f"process ended: {what}") from None
    if not succeeded:
        raise RankFailed(f"{what}: {value}")
    return value


def read(connection: Connection) -> Any:
    """What was told.

    Raises:
        EOFError, OSError: the other end is closed.
    """
    return torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)


def serve(connection: Connection, *own: Any) -> None:
    """In a rank's process: call what is asked for, with what is its `own` before the arguments, until nobody asks."""
    while True:
        try:
            function, arguments = read(connection)
        except (EOFError, OSError):
            return
        tell(connection, _answer(function, (*own, *arguments)))


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(*arguments)
    except BaseException:
        return False, traceback.format_exc()
