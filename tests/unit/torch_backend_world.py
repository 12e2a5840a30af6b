"""Processes in which torch.distributed runs on Paceline, for the tests of the backend."""

from __future__ import annotations

import gc
import io
import itertools
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forks import FORKS

ANSWER_WITHIN_S = 60.0


gloo: list[Any] = []
"""In a rank's process: the group of all ranks under torch's own gloo."""


class RankFailed(Exception):
    """A rank raised; the message holds its traceback."""


class TorchWorld:
    """Some ranks, with a default process group on Paceline and one of gloo beside it."""

    def __init__(self, size: int, folder: Path, *, timeout_s: float = 30.0) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._meeting_points = (folder / f"meeting-point-{number}" for number in itertools.count())

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(rank, *arguments)` on every rank; the results in rank order.

        After an error the processes are replaced by new ones, so that the next call finds a working group.

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
            connection.send((function, arguments))

    def result(self, rank: int) -> Any:
        """What the started function returned on one rank."""
        connection = self._connections[rank]
        if not connection.poll(ANSWER_WITHIN_S):
            raise RankFailed(f"rank {rank} has not answered within {ANSWER_WITHIN_S} s")
        try:
            raw = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            raise RankFailed(f"the process of rank {rank} ended") from None
        succeeded, value = torch.load(io.BytesIO(raw), weights_only=False)
        if not succeeded:
            raise RankFailed(f"rank {rank}: {value}")
        return value

    def kill(self, rank: int) -> float:
        """End a rank as the kernel would; the time at which that was asked for."""
        os.kill(self._processes[rank].pid, signal.SIGKILL)
        return time.time()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []

    def __enter__(self) -> TorchWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        meeting_point = next(self._meeting_points).as_uri()
        for rank in range(self.size):
            ours, theirs = FORKS.Pipe()
            arguments = (rank, self.size, meeting_point, self._timeout_s, theirs)
            process = FORKS.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)


def _serve(rank: int, size: int, meeting_point: str, timeout_s: float, connection: Connection) -> None:
    import paceline.torch_backend  # noqa: F401 - registers it

    torch.set_num_threads(1)
    dist.init_process_group(
        "paceline", init_method=meeting_point, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    gloo.append(dist.new_group(backend="gloo"))
    gc.freeze()  # so that a test may collect its own garbage in little time
    try:
        while True:
            function, arguments = connection.recv()
            answer = io.BytesIO()
            torch.save(_answer(function, rank, arguments), answer)
            connection.send_bytes(answer.getvalue())
    except (EOFError, OSError):
        pass
    # Past gloo's threads, which may still hold on to a broken connection.
    os._exit(0)


def _answer(function: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(rank, *arguments)
    except BaseException:
        return False, traceback.format_exc()
