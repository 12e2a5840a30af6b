"""A local process with some of the workers, as the simulation sees it."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

import cloudpickle
import torch

from paceline.engines.threads import share_of
from paceline.engines.virtual.job import VirtualJob
from paceline.engines.virtual.spread.channel import Channel
from paceline.engines.virtual.spread.turns import BUSY, GO
from paceline.engines.virtual.worlds import device_of
from paceline.errors import UsageError
from paceline.seeding import random_state

_PATIENCE_S = 5.0
_DESCRIPTORS_PER_WORKER = 4
"""Of memory that it shares with its deputy: strategies allocate two pieces, which have two descriptors at first."""
_MAIN = "from paceline.engines.virtual.spread.crew_main import main; main({channel}, {setup})"


@dataclass(frozen=True)
class Setup:
    """What a crew is told before it begins, and finds as it is here."""

    ranks: tuple[int, ...]
    job: bytes
    """Pickled, to be read when `path` is in place."""
    num_threads: int
    path: tuple[str, ...]
    arguments: tuple[str, ...]
    python_path: str | None
    dtype: torch.dtype
    random_state: dict[str, Any]


@final
class Crew:
    """Starts the process. Whatever becomes of this one, it does not outlive it.

    Args:
        crews: all of the run.
    """

    def __init__(self, setup: Setup, crews: Sequence[Crew]) -> None:
        self.ranks = setup.ranks
        self._crews = crews
        own, theirs = socket.socketpair()
        with theirs, _readable(pickle.dumps(setup)) as content:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN.format(channel=theirs.fileno(), setup=content)],
                pass_fds=[theirs.fileno(), content],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is this process's affair
                env={**os.environ, "PYTHONPATH": os.pathsep.join(setup.path)},
            )
        self._channel = Channel(own)
        self._answered: set[int] = set()  # workers that have said nothing since, and soon will
        self._busy: set[int] = set()  # those of whom it is known until when they compute
        # Whether it has been told to compute since somebody was answered who says something soon: the same there, as
        # frames keep their order.
        self._is_going = False
        self._is_computing = False
        self._heard: dict[int, deque[bytes]] = {rank: deque() for rank in self.ranks}

    def send(self, rank: int, content: bytes, *, is_busy: bool) -> None:
        """Answer a worker.

        Args:
            is_busy: it is known until when the worker computes after it, so that it need not say so.

        Raises:
            EOFError: the process has died.
        """
        if is_busy:
            self._busy.add(rank)
            self._is_computing = self._is_computing or self._is_going
        else:
            self._answered.add(rank)
            self._is_going = False
        self._channel.send(rank | BUSY if is_busy else rank, content)

    def receive(self, rank: int) -> bytes:
        """What a worker says next; waits for it, and has crews compute meanwhile.

        Raises:
            EOFError: the process has died.
        """
        heard = self._heard[rank]
        while not heard:
            frame = self._channel.poll()
            if frame is None:
                self._let_compute(rank)
                frame = self._channel.receive()
            number, content = frame
            self._note(number & ~BUSY, is_busy=bool(number & BUSY))
            self._heard[number & ~BUSY].append(content)
        return heard.popleft()

    def _let_compute(self, rank: int) -> None:
        """While a worker is waited for, all crews compute, but this one only if the worker has to be computed.

        With what `Turns` does, 20 workers of the conv net in two crews on two cores took 2.9 ms a gradient instead of
        4.1 under `ps-asp`, and 3.3 instead of 4.0 under `all-reduce`.
        """
        says_soon = rank in self._answered and not self._is_computing
        for crew in self._crews:
            if crew is not self or not says_soon:
                crew._go()

    def _go(self) -> None:
        if not self._is_going:
            self._is_going = True
            self._is_computing = self._is_computing or bool(self._busy)
            with suppress(EOFError):  # who waits for one of its workers will notice
                self._channel.send(GO, b"")

    def _note(self, rank: int, *, is_busy: bool) -> None:
        """A worker has said something: what was computed is over."""
        self._answered.discard(rank)
        if is_busy:
            self._busy.add(rank)
        else:
            self._busy.discard(rank)
        self._is_computing = self._is_going and bool(self._busy)

    def death(self) -> str:
        """How the process ended that has died, in words."""
        code = self._process.wait()
        if code < 0:
            return f"process {self._process.pid} was ended by {signal.Signals(-code).name}"
        return f"process {self._process.pid} ended with status {code}"

    def hang_up(self) -> None:
        """Let the process know that nobody listens any more, at which it ends."""
        self._channel.close()

    def end(self, *, until_s: float) -> None:
        """Have it end, by force where it has not by then.

        Args:
            until_s: of time.monotonic().
        """
        try:
            self._process.wait(max(0.0, until_s - time.monotonic()))
        except BaseException as trouble:
            self._process.kill()
            self._process.wait()
            if not isinstance(trouble, subprocess.TimeoutExpired):
                raise


@contextmanager
def crews_of(job: VirtualJob) -> Iterator[list[Crew]]:
    """One for each process that the job is spread over, all ended at the end; none where that is this one alone.

    Meanwhile this process computes with as many threads as each of them.

    Raises:
        UsageError: workers compute on a GPU, or the program is a function that cannot be sent.
    """
    crews: list[Crew] = []
    if job.num_crews == 0:
        yield crews
        return
    with _descriptors(_DESCRIPTORS_PER_WORKER * job.num_workers), _threads(job.num_crews) as num_threads:
        try:
            for setup in _setups(job, num_threads):
                crews.append(Crew(setup, crews))
            yield crews
        finally:
            until_s = time.monotonic() + _PATIENCE_S
            with ExitStack() as ends:  # each is ended, also if an interrupt comes while another one is
                for crew in crews:
                    crew.hang_up()
                    ends.callback(crew.end, until_s=until_s)


def _setups(job: VirtualJob, num_threads: int) -> Iterator[Setup]:
    if device_of(job.config).type != "cpu":
        raise UsageError("workers are spread over processes where they compute on cores; add --device cpu")
    try:
        content = cloudpickle.dumps(job)
    except Exception as error:
        raise UsageError(
            f"the function cannot be sent to other processes: {error}; run it in one (processes=1), or as a script"
        ) from None
    here = os.getcwd()
    for first in range(job.num_crews):
        yield Setup(
            ranks=tuple(range(first, job.num_workers, job.num_crews)),
            job=content,
            num_threads=num_threads,
            path=tuple(entry or here for entry in sys.path),
            arguments=tuple(sys.argv),
            python_path=os.environ.get("PYTHONPATH"),
            dtype=torch.get_default_dtype(),
            random_state=random_state(),
        )


@contextmanager
def _readable(content: bytes) -> Iterator[int]:
    """A descriptor that it can be read from."""
    fd = os.memfd_create("paceline-setup")
    with open(fd, "w+b") as file:
        file.write(content)
        file.flush()
        file.seek(0)
        yield fd


@contextmanager
def _threads(num_crews: int) -> Iterator[int]:
    """This process, which makes the servers' updates, computes with a crew's share of torch's threads.

    Threads that wait for its next update keep a core busy that a crew computes on: 20 workers of the conv net under
    `ps-asp`, in two crews on two cores, took 6.2 ms a gradient with two threads here, 4.5 ms with one.
    """
    before = torch.get_num_threads()
    share = share_of(before, num_crews)
    torch.set_num_threads(share)
    try:
        yield share
    finally:
        torch.set_num_threads(before)


@contextmanager
def _descriptors(num_more: int) -> Iterator[None]:
    """So many more may be open, here and in processes that are started, where the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + num_more if hard == resource.RLIM_INFINITY else min(hard, soft + num_more)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
