"""A finished run as it is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import Result
from tests.lab.made import reaching, write_trial

DESCRIBED: dict[str, Any] = {
    "program": "/somewhere/train.py", "strategy": {"name": "ps-bsp"}, "num_workers": 2, "engine": "ray",
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_trial(tmp_path / "run", reaching(12.5), workers=2)
    return tmp_path / "run"


def printed(directory: Path, **changes: Any) -> list[str]:
    (directory / "manifest.json").write_text(json.dumps(DESCRIBED | changes))
    return str(Result.open(directory)).splitlines()


def test_it_says_what_was_run_and_what_came_of_it(directory: Path) -> None:
    assert printed(directory) == [
        "train.py: ps-bsp on 2 workers",
        "10 iterations in 12.50 s of training",
        "last evaluation: accuracy 0.5",
        f"files in {directory}",
    ]


def test_simulated_time_is_said_to_be(directory: Path) -> None:
    assert printed(directory, engine="virtual", num_workers=1, program="train")[:2] == [
        "train: ps-bsp on 1 worker",
        "10 iterations in 12.50 virtual s of training",
    ]


def test_a_run_that_made_no_step(tmp_path: Path) -> None:
    assert printed(tmp_path)[1:3] == ["0 iterations in 0.00 s of training", "last evaluation: none"]
