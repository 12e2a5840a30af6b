"""Processes of tests: forked from a server that has loaded what they import, so that they start in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

# There is one such server in a process, whoever asks for it: the list is everybody's. torch._dynamo is what the first
# optimizer would load otherwise, in most of a second.
FORKS = multiprocessing.get_context("forkserver")
LOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "pytest",
    "hypothesis",
    "paceline.running.launch",
    "paceline.training.worker",
    "paceline.torch_backend",
]
FORKS.set_forkserver_preload(LOADED)


@contextmanager
def having_loaded(*modules: str) -> Iterator[None]:
    """Meanwhile processes are forked from another server, which has loaded these, too; where one is not installed, it
    goes without."""
    another: Any = forkserver.ForkServer()
    another.set_forkserver_preload([*LOADED, *modules])
    before = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = another.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = before
        _end(another)


def _end(server: Any) -> None:
    """A process that some test left may hold the line by whose end the server would know that it is to end, so it is
    told."""
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGTERM)
    server._stop()
