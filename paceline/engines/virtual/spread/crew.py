"""A local process with some of the workers, as the simulation sees it."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import final

import cloudpickle

from paceline.engines.threads import share_of
from paceline.engines.virtual.job import VirtualJob
from paceline.engines.virtual.spread.channel import Channel
from paceline.engines.virtual.worlds import device_of
from paceline.errors import UsageError

SETUP = 0xFFFFFFFF
"""The number of the first frame, which is about all workers."""
_PATIENCE_S = 5.0
_DESCRIPTORS_PER_WORKER = 8
"""Of memory that it shares with its deputy, of which strategies allocate two pieces."""
_MAIN = "from paceline.engines.virtual.spread.crew_main import main; main({fd})"


@final
class Crew:
    """Starts the process. Whatever becomes of this one, it does not outlive it.

    Args:
        ranks: of its workers.
        num_threads: that torch computes with there.
    """

    def __init__(self, job: VirtualJob, ranks: Sequence[int], *, num_threads: int) -> None:
        self.ranks = tuple(ranks)
        own, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN.format(fd=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is this process's affair
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._channel = Channel(own)
        self._heard: dict[int, deque[bytes]] = {rank: deque() for rank in ranks}
        setup = job, self.ranks, num_threads, os.environ.get("PYTHONPATH")
        self._channel.send(SETUP, cloudpickle.dumps(setup))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, rank: int, content: bytes) -> None:
        """Answer a worker.

        Raises:
            EOFError: the process has died.
        """
        self._channel.send(rank, content)

    def receive(self, rank: int) -> bytes:
        """What a worker says next; waits for it.

        Raises:
            EOFError: the process has died.
        """
        heard = self._heard[rank]
        while not heard:
            about, content = self._channel.receive()
            self._heard[about].append(content)
        return heard.popleft()

    def death(self) -> str:
        """How the process ended that has died, in words."""
        code = self._process.wait()
        if code < 0:
            return f"its process {self._process.pid} was ended by {signal.Signals(-code).name}"
        return f"its process {self._process.pid} ended with status {code}"

    def end(self) -> None:
        """Have it end, whatever it is at."""
        self._channel.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def crews_of(job: VirtualJob) -> list[Crew]:
    """One for each process that the job is to be spread over; none where that is this one alone.

    Raises:
        UsageError: workers compute on a GPU.
    """
    num_processes = min(job.num_processes, job.num_workers)
    if num_processes == 1:
        return []
    if device_of(job.config).type != "cpu":
        raise UsageError("workers are spread over processes where they compute on cores; add --device cpu")
    _allow_descriptors(_DESCRIPTORS_PER_WORKER * job.num_workers)
    num_threads = share_of(len(os.sched_getaffinity(0)), num_processes)
    return [
        Crew(job, range(first, job.num_workers, num_processes), num_threads=num_threads)
        for first in range(num_processes)
    ]


def _allow_descriptors(num_more: int) -> None:
    """As many as the system lets this process have, and with it those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + num_more if hard == resource.RLIM_INFINITY else min(hard, soft + num_more)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
