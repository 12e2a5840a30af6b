"""A host that comes to a cluster by itself, where a scheduler starts the same program on all of a job's hosts."""

import hashlib
import os
import signal
import socket
import time
from pathlib import Path
from threading import Event

from paceline.engines.ray import allocated_node
from paceline.engines.ray.allocation import MEET_S
from paceline.engines.ray.local_directory import PLACE, same_directory
from paceline.engines.ray.logged_process import LoggedProcess
from paceline.engines.ray.tokens import jobs_token
from paceline.errors import RunFailed
from paceline.scheduler import Allocation

_LOOK_S = 0.5
_GONE_S = 5.0
"""A cluster that is without its head for so long has ended."""


def directory_of(allocation: Allocation) -> Path:
    """Where Ray's files go, which is to be the same on all hosts, and a short path."""
    return PLACE / f"paceline-job-{hashlib.sha256(allocation.job.encode()).hexdigest()[:12]}"


def take_part(allocation: Allocation, *, next_s: float) -> None:
    """Lend this host to the clusters that the job's first host starts, until there are no more. To be called in the
    main thread, for SIGTERM's sake.

    Args:
        next_s: how long after the end of one there may be another.

    Raises:
        UsageError: the job has no token.
        RunFailed: the first host starts none within 5 minutes, or Ray does not start here.
    """
    directory = directory_of(allocation)
    is_told = Event()
    # SageMaker tells all hosts at once to end. What the first one runs then still needs this one, to save where it is.
    signal.signal(signal.SIGTERM, lambda *_: is_told.set())
    with jobs_token(), same_directory(directory):
        address = _wait_for_head(allocation, MEET_S, is_told)
        if is_told.is_set():
            return
        if address is None:
            raise RunFailed(
                f"{allocation.hosts[0]}, the job's first host, has started no cluster within {MEET_S:.0f} s: look into "
                "what paceline says there"
            )
        while address is not None:
            _lend(address, directory)
            address = _wait_for_head(allocation, next_s, is_told)


def _wait_for_head(allocation: Allocation, patience_s: float, is_told: Event) -> str | None:
    """The address at which a head listens; None: none does for so long, or this host is told to end."""
    give_up_s = time.monotonic() + patience_s
    while time.monotonic() < give_up_s and not is_told.wait(_LOOK_S):
        try:
            host = socket.gethostbyname(allocation.hosts[0])
        except OSError:
            host = ""  # a name may be known only when its host has come
        if host and allocated_node.listens(host, allocation.meeting_port or 0):
            return f"{host}:{allocation.meeting_port}"
    return None


def _lend(address: str, directory: Path) -> None:
    """Ray's part on this host, while its head is there; raises RunFailed if it ends before."""
    host, _, port = address.rpartition(":")
    command = allocated_node.joining(address, str(len(os.sched_getaffinity(0))))
    process = LoggedProcess(command, directory / f"here-{os.getpid()}.log")
    try:
        seen_s = time.monotonic()
        while time.monotonic() < seen_s + _GONE_S:
            time.sleep(_LOOK_S)
            if allocated_node.listens(host, int(port)):
                seen_s = time.monotonic()
                if process.has_ended:
                    raise RunFailed(f"Ray does not start here, or has ended: {process.words}")
    finally:
        process.stop()
