"""What a crew's process does: it computes its workers' steps, one at a time, as it is told."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Sequence
from functools import partial
from typing import final

import cloudpickle
import torch

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from paceline.engines.virtual.backward import BackwardEnds
from paceline.engines.virtual.job import VirtualJob
from paceline.engines.virtual.process import Scheduler
from paceline.engines.virtual.spread.channel import Channel
from paceline.engines.virtual.spread.messages import Over
from paceline.engines.virtual.spread.remote import RemoteCollective, RemoteReporter, RemoteStore
from paceline.engines.virtual.spread.seat import Seat
from paceline.engines.virtual.surroundings import Surroundings
from paceline.engines.virtual.timeline import Timeline
from paceline.engines.virtual.topology import place
from paceline.engines.virtual.worlds import Worlds, run_in
from paceline.engines.world import World

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(fd: int) -> None:
    """The process that `Crew` starts; `fd` is the other end of its channel."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = Channel(socket.socket(fileno=fd))
    try:
        _, content = channel.receive()
        job, ranks, num_threads, python_path = cloudpickle.loads(content)
        if python_path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = python_path
        torch.set_num_threads(num_threads)
        _Members(channel, job, ranks).take_turns()
    except EOFError:
        pass  # the simulation is over
    os._exit(0)  # scripts that are not over have nothing left to say


@final
class _Members:
    """The workers of this crew."""

    def __init__(self, channel: Channel, job: VirtualJob, ranks: Sequence[int]) -> None:
        self._channel, self._job = channel, job
        places = place(job.cluster, num_workers=job.num_workers, num_servers=job.strategy.num_servers())
        self._worlds = Worlds(job, places)
        self._backward = BackwardEnds()
        self._scheduler = Scheduler(Timeline(), require_waitable=self._backward.require_outside)
        self._seats: dict[int, Seat] = {}
        self._seats_by_name: dict[str, Seat] = {}
        for rank in ranks:
            process = self._scheduler.spawn(f"worker-{rank}", partial(self._work, rank))
            self._seats[rank] = self._seats_by_name[process.name] = Seat(channel, rank, process, self._scheduler)

    def take_turns(self) -> None:
        """Until the simulation hears no more.

        Raises:
            EOFError: that is so.
        """
        with Surroundings(self._scheduler, self._backward, self._say).in_place():
            while True:
                rank, content = self._channel.receive()
                seat = self._seats[rank]
                seat.hear(content)
                self._scheduler.resume(seat.process)

    def _work(self, rank: int) -> None:
        seat = self._seats[rank]
        seat.take_answer()
        outcome = run_in(partial(self._world, seat), self._job.program)
        seat.over(Over(outcome))

    def _world(self, seat: Seat) -> World:
        job, costs = self._job, self._job.cluster.communication
        collective: Collective = AloneCollective()
        if job.num_workers > 1:
            collective = RemoteCollective(
                seat,
                size=job.num_workers,
                operation_s=costs.operation_us * 1e-6,
                message_s=costs.message_us * 1e-6,
            )
        return self._worlds.of(
            seat.rank,
            seat.process,
            collective=collective,
            store=RemoteStore(seat) if job.strategy.num_servers() else None,
            reporter=RemoteReporter(seat),
            before_step=seat.require_going,
            announce=seat.announce,
        )

    def _say(self, who: str, line: str) -> None:
        self._seats_by_name[who].print(line)
