"""`paceline compare --engine virtual` as a user starts it: killed, and gone on with to the bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from paceline import Study
from tests.distributed.harness import TRAIN, wait_until

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"seeds": 2, "eval_every": 50, "device": "cpu", "engine": "virtual", "cluster": "lab-1gbe"}


def test_killed_in_the_middle_and_gone_on_with(start, tmp_path: Path) -> None:
    """One process, and the same draws whenever a trial runs: tables are those of a study that nobody killed."""
    out = tmp_path / "out"
    given = [str(part) for key, value in OPTIONS.items() for part in (f"--{key.replace('_', '-')}", value)]
    asked = ["--strategies", "all-reduce,ps-asp", "--workers", "1,2", *given, "--out", out, "--", "--steps", 100]
    command = ["compare", TRAIN, *asked]
    killed = start(*command)
    assert wait_until(lambda: list((out / "trials").glob("[!.]*")))
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.wait()
    killed.assert_nothing_left()
    before = {path: path.stat().st_mtime_ns for path in out.glob("trials/[!.]*/steps.csv")}
    assert 1 <= len(before) < 8

    again = start(*command, COLUMNS="80")
    whole = Study.run(
        TRAIN, strategies=["all-reduce", "ps-asp"], workers=[1, 2], arguments=("--steps", "100"),
        out=tmp_path / "whole", **OPTIONS,
    )  # fmt: skip
    output = again.wait()
    assert again.status == 0, output
    assert {path: path.stat().st_mtime_ns for path in before} == before, "a finished trial was run again"
    assert "8/8 ps-asp x 2 seed 1: loss " in output
    assert "Times are virtual, those of the simulated cluster lab-1gbe." in " ".join(output.split())
    table = output[output.index("strategy") :]
    assert all(len(line) <= 80 for line in table.splitlines() if "Report:" not in line)
    mended = Study.open(out).frames
    for name in ("trials", "evaluations", "workers", "staleness", "pace", "summary"):
        left, right = (getattr(frames, name).drop(columns="study") for frames in (mended, whole.frames))
        pd.testing.assert_frame_equal(left, right, check_exact=True)
