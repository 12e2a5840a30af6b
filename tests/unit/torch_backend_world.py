"""Processes in which torch.distributed runs on Paceline, for the tests of the backend."""

from __future__ import annotations

import gc
import itertools
import os
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from tests.ranks import Ranks, serve

gloo: list[Any] = []
"""In a rank's process: the group of all ranks under torch's own gloo."""


@final
class TorchWorld(Ranks):
    """Ranks with a default process group on Paceline and one of gloo beside it; functions are given their rank."""

    def __init__(self, size: int, folder: Path, *, timeout_s: float = 60.0) -> None:
        super().__init__(size)
        self._timeout_s = timeout_s
        self._meeting_points = (folder / f"meeting-point-{number}" for number in itertools.count())

    def open(self) -> None:
        meeting_point = next(self._meeting_points).as_uri()
        for rank in range(self.size):
            self.fork(_serve, rank, self.size, meeting_point, self._timeout_s)


def _serve(rank: int, size: int, meeting_point: str, timeout_s: float, connection: Connection) -> None:
    import paceline.torch_backend  # noqa: F401 - registers it

    torch.set_num_threads(1)
    dist.init_process_group(
        "paceline", init_method=meeting_point, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    gloo.append(dist.new_group(backend="gloo"))
    gc.freeze()  # so that a test may collect its own garbage in little time
    serve(connection, rank)
    # Past gloo's threads, which may still hold on to a broken connection.
    os._exit(0)
