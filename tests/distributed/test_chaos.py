"""A handful of deaths at drawn places, over all-reduce, local updates and servers, and schedules."""

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
        (["--workers", 3, "--kills", 3, "--seed", 2, "--max-steps", 30], []),
        (["--strategy", "diloco", "--option", "every=4", "--kills", 1, "--seed", 2], ["--epochs", 3]),
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
def test_servers_die_and_a_schedule_has_it_again_with_a_full_disk_and_a_dead_launcher(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    """The launcher dies before it has written another checkpoint than the one that did not fit on the disk."""
    given = ["--strategy", "ps-bsp", "--option", "servers=2", "--option", "replicas=1", "--workers", 2]
    given += ["--max-steps", 30]
    full = {"who": "launcher", "place": "writes a checkpoint", "number": 4, "kind": "full"}
    of_launcher = {"strikes": [full, {**full, "number": 5, "kind": "kill"}], "replacements": 0}
    schedules = []
    for name, more in (("first", ["--kills", 1, "--seed", 2]), ("again", ["--schedule", tmp_path / "longer.json"])):
        command = start("chaos", DEMO, *given, *more, "--out", tmp_path / name)
        output = command.wait()
        assert command.status == 0, output
        assert re.search(r"\b(1 death|[1-9]\d* deaths) in (1 run|\d+ runs), 0 wrong", output), output
        assert "model 0.0e+00 apart" in output
        schedules.append(json.loads((tmp_path / name / "schedule.json").read_text()))
        (tmp_path / "longer.json").write_text(json.dumps({"runs": [*schedules[0]["runs"], of_launcher]}))
    assert schedules[1]["runs"] == [*schedules[0]["runs"], of_launcher]
    assert "full launcher, writes a checkpoint (4); kill launcher, writes a checkpoint (5)" in output


@pytest.mark.timeout(400)
def test_each_gradient_counts_once_without_lock_step(start: Callable[..., Command], tmp_path: Path) -> None:
    """As the servers' own counts say, and the model, to which each gradient adds its own, to the last digits."""
    given = ["--strategy", "ps-asp", "--option", "servers=2", "--option", "replicas=1", "--workers", 2]
    command = start("chaos", SCRIPTS / "sums.py", *given, "--kills", 1, "--seed", 2, "--out", tmp_path / "out")
    output = command.wait()
    assert command.status == 0, output
    assert re.search(r"kill|segfault", output)
    assert re.search(r"model \d\.\de-1[5-9] apart", output), output
