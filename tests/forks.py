"""Processes of tests: forked from a server that has loaded what they import, so that they start in milliseconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

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
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # the next process starts another
    FORKS.set_forkserver_preload(modules)
