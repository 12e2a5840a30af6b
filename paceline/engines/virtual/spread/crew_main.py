"""What a crew's process does: it computes its workers' steps, one at a time, as it is told."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
from functools import partial
from typing import final

import torch

from paceline.cluster.placement import place
from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from paceline.engines.scripting import outcome_of
from paceline.engines.virtual.computing.backward import BackwardEnds
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.isolation.surroundings import Surroundings
from paceline.engines.virtual.job import VirtualJob
from paceline.engines.virtual.process import Scheduler
from paceline.engines.virtual.spread.carrier import Carrier
from paceline.engines.virtual.spread.channel import Channel
from paceline.engines.virtual.spread.crew import Setup
from paceline.engines.virtual.spread.messages import Over
from paceline.engines.virtual.spread.remote import RemoteCollective, RemoteReporter, RemoteStore
from paceline.engines.virtual.spread.seat import Seat
from paceline.engines.virtual.spread.turns import Turns
from paceline.engines.virtual.worlds import Worlds, run_in
from paceline.engines.world import World
from paceline.memory import keep_freed_memory
from paceline.seeding import set_random_state

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(channel_fd: int, setup_fd: int) -> None:
    """The process that `Crew` starts, with its end of the channel and what it is told to begin with."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _give_way()
    keep_freed_memory()
    channel = Channel(socket.socket(fileno=channel_fd))
    os.register_at_fork(after_in_child=channel.close)  # else the simulation would take a fork for this process
    with open(setup_fd, "rb") as file:
        setup: Setup = pickle.load(file)
    _look_like_the_launcher(setup)
    crew = None
    try:
        crew = _Members(channel, setup)
        crew.take_turns()
    except EOFError:  # the simulation is over
        pass
    except Exception as error:
        _say_what_is_wrong(channel, setup, error)
    sys.stdout.flush()
    sys.stderr.flush()
    if crew is None or not crew.is_over:
        os._exit(0)  # scripts that are not over have nothing left to say


def _give_way() -> None:
    """The simulation, which all crews wait for, is not to wait for a core that one of them computes on: on two cores, a
    message to a crew of two kept it for 5 to 10 ms instead of 10 us."""
    with contextlib.suppress(OSError):  # a sandbox may not allow it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(5)


def _look_like_the_launcher(setup: Setup) -> None:
    """What scripts may look at is as it is there."""
    sys.path[:], sys.argv = setup.path, list(setup.arguments)
    if setup.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = setup.python_path
    torch.set_num_threads(setup.num_threads)
    torch.set_default_dtype(setup.dtype)
    set_random_state(setup.random_state)


def _say_what_is_wrong(channel: Channel, setup: Setup, error: Exception) -> None:
    """Every worker failed with it; and wait for the simulation to end."""
    try:
        for rank in setup.ranks:
            channel.send(rank, Carrier().pack([Over(outcome_of(error, num_steps=0))]))
        while True:
            channel.receive()
    except EOFError:
        pass


@final
class _Members:
    """The workers of this crew."""

    def __init__(self, channel: Channel, setup: Setup) -> None:
        job: VirtualJob = pickle.loads(setup.job)
        self._job, self._turns = job, Turns(channel)
        places = place(job.cluster, num_workers=job.num_workers, num_servers=job.strategy.traits.num_servers)
        self._worlds = Worlds(job, places)
        backward = BackwardEnds()
        self._scheduler = Scheduler(EventQueue(), require_waitable=backward.require_outside)
        self._surroundings = Surroundings(self._scheduler, backward, self._say)
        self._seats: dict[int, Seat] = {}
        self._seats_by_name: dict[str, Seat] = {}
        for rank in setup.ranks:
            process = self._scheduler.spawn(f"worker-{rank}", partial(self._work, rank))
            self._seats[rank] = self._seats_by_name[process.name] = Seat(
                channel, rank, process, self._scheduler, self._turns
            )

    @property
    def is_over(self) -> bool:
        """Whether all workers are."""
        return all(process.is_over for process in self._scheduler.processes)

    def take_turns(self) -> None:
        """Until the simulation hears no more.

        Raises:
            EOFError: that is so.
        """
        with self._surroundings.in_place():
            while True:
                rank, content = self._turns.next()
                seat = self._seats[rank]
                if content is None:
                    self._scheduler.go_on(seat.process)
                else:
                    seat.hear(content)
                    self._scheduler.resume(seat.process)

    def _work(self, rank: int) -> None:
        seat = self._seats[rank]
        seat.take_answer()
        outcome = run_in(partial(self._world, seat), self._job.program)
        self._surroundings.finish_lines(seat.process.name)
        seat.over(outcome)

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
            store=RemoteStore(seat) if job.strategy.traits.num_servers else None,
            reporter=RemoteReporter(seat),
            before_step=seat.require_going,
            on_promise=seat.promise,
        )

    def _say(self, who: str, line: str) -> None:
        self._seats_by_name[who].print(line)
