"""Worlds of real processes for the tests of collectives."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from paceline.comm.process_group.collective import connect_gloo
from paceline.comm.shared_memory.block import BlockAddress
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from tests.ranks import Ranks, hear, read, serve, tell

MEETING_S = 60.0


@final
class World(Ranks):
    """Ranks with a collective each, which functions are given."""

    def __init__(self, backend: str, size: int, *, deadline_s: float | None = MEETING_S) -> None:
        super().__init__(size)
        self.backend = backend
        self._deadline_s = deadline_s

    def open(self) -> None:
        ranks = [self.fork(_serve, self.backend, rank, self.size, self._deadline_s) for rank in range(self.size)]
        told = [hear(connection, f"start of rank {rank}") for rank, connection in enumerate(ranks)]
        for connection in ranks:
            tell(connection, told)


def _serve(backend: str, rank: int, size: int, deadline_s: float | None, connection: Connection) -> None:
    torch.set_num_threads(1)
    collective = _meet(backend, rank, size, connection)
    # Ranks may be slow to meet on a busy machine; the deadline that a test wants counts from then on.
    collective.set_deadline(deadline_s)
    serve(connection, collective)
    collective.close()
    # Past gloo's threads, which may still hold on to a broken connection.
    os._exit(0)


def _meet(backend: str, rank: int, size: int, connection: Connection) -> Collective:
    control = SharedMemoryCollective.prepare()
    store = _store(size) if backend == "gloo" and rank == 0 else None
    tell(connection, (True, (astuple(control.address), store.port if store is not None else 0)))
    told = read(connection)
    if backend == "alone":
        return AloneCollective()
    if backend == "shared_memory":
        addresses = [BlockAddress(*numbers) for numbers, _ in told]
        return SharedMemoryCollective(rank=rank, addresses=addresses, control=control, deadline_s=MEETING_S)
    store = store or _store(size, port=told[0][1])
    return connect_gloo(store, rank=rank, size=size, address="127.0.0.1", deadline_s=MEETING_S)


def _store(size: int, *, port: int = 0) -> dist.TCPStore:
    """The one that rank 0 keeps at a port of the system's choice, or the way to it."""
    patience = timedelta(seconds=MEETING_S)
    return dist.TCPStore("127.0.0.1", port, size, port == 0, timeout=patience, wait_for_workers=False)


def caught(function: Callable[[], Any]) -> tuple[str, str, float]:
    """Name and message of what `function` raises (empty where it raises nothing), and when it did."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), time.time()
    return "", "", time.time()


def wait_for(file: Path) -> None:
    """Until another rank has made it."""
    give_up_s = time.monotonic() + MEETING_S
    while not file.exists():
        assert time.monotonic() < give_up_s, f"nobody made {file}"
        time.sleep(0.01)


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
