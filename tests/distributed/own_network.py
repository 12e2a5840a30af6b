"""Hosts of a test's own, in network namespaces."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.namespaces import Network, network


@contextmanager
def own_network(num_hosts: int, programs: str | None = None) -> Iterator[Network]:
    """Hosts on a switch, which only root can make. Their names are always the same, so tests take turns. Their `ray`
    is of the folder `programs`, where the fixture `program_forks` has put it; none: it starts cold."""
    with ExitStack() as until_then:
        path = Path(tempfile.gettempdir(), f"paceline-test-network-{os.getuid()}.lock")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        until_then.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            net = until_then.enter_context(network(num_hosts))
        except SystemExit as reason:
            pytest.skip(str(reason))
        yield net if programs is None else replace(net, programs=Path(programs))
