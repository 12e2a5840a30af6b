"""Studies on the stand-in for Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.lab import runner
from paceline.lab.study import Study
from paceline.running import launch
from tests.lab.machine import SETTINGS, Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(runner, "connected", made.connected)
    monkeypatch.setattr(launch, "run", made.run)
    return made


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Study]:
    script = tmp_path / "train.py"
    script.write_text("import paceline\n")

    def go(**settings: Any) -> Study:
        return Study.run(script, **{**SETTINGS, "seeds": 2, "out": tmp_path / "out", **settings})

    return go
