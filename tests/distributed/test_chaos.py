"""A handful of deaths at drawn places, over all-reduce, local updates and servers, and a schedule once more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import SCRIPTS, Command

pytestmark = [pytest.mark.ray, pytest.mark.slow]
DEMO = SCRIPTS.parents[2] / "paceline" / "demo_script.py"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("settings", "script"),
    [
        (["--workers", 3, "--kills", 3, "--seed", 3, "--max-steps", 30], []),
        (["--strategy", "diloco", "--option", "every=4", "--kills", 1, "--seed", 1], ["--epochs", 3]),
    ],
    ids=["all-reduce", "diloco"],
)
def test_nothing_is_lost_whoever_dies(
    settings: list[Any], script: list[Any], start: Callable[..., Command], tmp_path: Path
) -> None:
    command = start("chaos", DEMO, *settings, "--out", tmp_path / "out", "--", *script)
    output = command.wait(timeout_s=380)
    assert command.status == 0, output
    assert ", 0 wrong; again: --schedule" in output
    command.assert_nothing_left()


@pytest.mark.timeout(400)
def test_servers_die_and_a_schedule_has_it_again(start: Callable[..., Command], tmp_path: Path) -> None:
    given = ["--strategy", "ps-bsp", "--option", "servers=2", "--option", "replicas=1", "--workers", 2]
    given += ["--max-steps", 30]
    schedules = []
    for name in ("first", "again"):
        more = ["--schedule", tmp_path / "first" / "schedule.json"] if name == "again" else ["--kills", 1]
        command = start("chaos", DEMO, *given, *more, "--out", tmp_path / name)
        output = command.wait()
        assert command.status == 0, output
        assert re.search(r"\b(1 death|[1-9]\d* deaths) in (1 run|\d+ runs), 0 wrong", output), output
        assert "model 0.0e+00 apart" in output
        schedules.append(json.loads((tmp_path / name / "schedule.json").read_text()))
    assert schedules[0] == schedules[1]
