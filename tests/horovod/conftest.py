"""Processes that tests of operations share, as starting them takes longer than most of those tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import paceline.horovod.torch as hvd
from paceline.horovod import runtime
from tests.horovod.world import HorovodWorld

SIZE = 3
EVERYBODY = tuple(range(SIZE))


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HorovodWorld]:
    with HorovodWorld(SIZE, tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one in the tests' own process."""
    hvd.init()
    yield
    runtime.end()
