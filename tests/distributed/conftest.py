"""What tests that start workers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import Network
from tests.distributed.harness import PACELINE, Command
from tests.distributed.own_network import own_network


@pytest.fixture
def hosts(program_forks: str) -> Iterator[Network]:
    with own_network(3, program_forks) as net:
        yield net


@pytest.fixture
def start(tmp_path: Path, program_forks: str) -> Iterator[Callable[..., Command]]:
    """Starts `paceline` (or another program) with arguments; whatever is left of it is ended after the test."""
    commands: list[Command] = []

    def started(*arguments: object, program: str = PACELINE, **environment: str) -> Command:
        command = Command([program, *map(str, arguments)], tmp_path, environment)
        commands.append(command)
        return command

    yield started
    for command in commands:
        command.close()
