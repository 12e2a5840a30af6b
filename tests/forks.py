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
    """Meanwhile the server has loaded these, too; where one is not installed, it goes without."""
    _begin_anew([*LOADED, *modules])
    try:
        yield
    finally:
        _begin_anew(LOADED)


def _begin_anew(modules: list[str]) -> None:
    """The next process starts another server. A process that some test left may hold the line by whose end the old one
    would know that it is to end, so it is told."""
    server: Any = vars(forkserver)["_forkserver"]
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGTERM)
    server._stop()
    FORKS.set_forkserver_preload(modules)
