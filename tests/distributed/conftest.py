"""What tests that start workers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.harness import PACELINE, Command


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
