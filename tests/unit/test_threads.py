"""Threads that wait sleep soon, unless the user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.threads import let_idle_threads_sleep

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody say anything, and what is said from now on taken back when the test ends."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_openmp_is_told_to_spin_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    let_idle_threads_sleep()
    shown = subprocess.run(
        [sys.executable, "-c", "import torch; torch.ones(2).sum()"],
        env={"OMP_DISPLAY_ENV": "verbose", "GOMP_SPINCOUNT": os.environ["GOMP_SPINCOUNT"]},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '4000'" in shown.stderr


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "ACTIVE")])
def test_what_the_environment_says_is_kept(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setenv(name, value)
    let_idle_threads_sleep()
    assert {other: os.environ[other] for other in NAMES if other in os.environ} == {name: value}
