"""What tests that start workers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import Network, network
from tests.distributed.harness import PACELINE, Command


@pytest.fixture
def hosts() -> Iterator[Network]:
    """Three on a switch of their own, which only root can make."""
    try:
        with network(3) as net:
            yield net
    except SystemExit as reason:
        pytest.skip(str(reason))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts `paceline` (or another program) with arguments; whatever is left of it is ended after the test."""
    commands: list[Command] = []

    def started(*arguments: object, program: str = PACELINE, **environment: str) -> Command:
        command = Command([program, *map(str, arguments)], tmp_path, environment)
        commands.append(command)
        return command

    yield started
    for command in commands:
        command.close()
