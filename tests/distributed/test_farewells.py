"""The launcher waits for last words of those that may still have some. For the dead it does not: these runs end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.engines.ray import hearing, supervisor
from paceline.engines.ray.supervisor import Supervisor
from tests.distributed.harness import TRAIN, events
from tests.distributed.local import Listener

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_here")]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "_FAREWELL_S", 1e9)


def test_a_server_that_dies_once_all_workers_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Supervisor._part

    def kill_and_part(self: Supervisor) -> None:
        os.kill(self._members.infos["server-0"].pid, signal.SIGKILL)
        part(self)

    monkeypatch.setattr(Supervisor, "_part", kill_and_part)
    arguments = ["--steps", "5"]
    result = paceline.run(
        TRAIN, strategy="ps-asp", workers=1, arguments=arguments, out=tmp_path / "out", watcher=Listener()
    )
    assert result.iteration == 5


@pytest.mark.slow
def test_an_interrupt_beside_a_dead_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*statements: Any, **standing: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor, "judge", interrupted)
    out = tmp_path / "out"
    arguments = ["--fault", "kill", "--rank", "0", "--step", "3", "--results", str(out)]
    with pytest.raises(KeyboardInterrupt):
        paceline.run(TRAIN, workers=1, arguments=arguments, out=out, watcher=Listener())
    assert "interrupted" in [event["name"] for event in events(out)]
