"""Processes in which scripts of Horovod run on Paceline."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist

from tests.ranks import Ranks, serve


@final
class HorovodWorld(Ranks):
    """Ranks that can `hvd.init()`; functions are given their rank."""

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size)
        self._folder, self._num_worlds = folder, 0

    def open(self) -> None:
        self._num_worlds += 1
        meeting_point = str(self._folder / f"meeting-point-{self._num_worlds}")
        for rank in range(self.size):
            self.fork(_serve, rank, self.size, meeting_point)


def _serve(rank: int, size: int, meeting_point: str, connection: Connection) -> None:
    from paceline.comm.connecting import connect
    from paceline.config import RunConfig
    from paceline.engines.world import World, enter
    from paceline.membership import Membership
    from paceline.records import NullReporter
    from paceline.strategies.all_reduce import AllReduce
    from paceline.strategies.base import Context

    torch.set_num_threads(1)
    store = dist.FileStore(meeting_point, size)
    collective = connect(store, rank=rank, size=size, deadline_s=60.0)
    context = Context(rank, Membership.first(size), rank, size, torch.device("cpu"), collective)
    enter(World(context, AllReduce(), RunConfig(), NullReporter(), store=store))
    serve(connection, rank)
    os._exit(0)
