"""`paceline compare` as a user starts it: killed, gone on with, and with a trial that fails."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pandas as pd
import pytest

from paceline import Study
from tests.distributed.harness import AGENTS_GRACE_S, TRAIN, is_training, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_killed_in_the_middle_and_gone_on_with(start, tmp_path: Path) -> None:
    """No finished trial is repeated, none is lost, the one that was killed ends as if it had not been, and a trial
    that fails is shown beside the others.

    One worker alone trains alike under both strategies, so that each trial is what the other is to be compared with.
    """
    out = tmp_path / "out"
    command = [
        "compare", TRAIN, "--strategies", "single,all-reduce", "--workers", "1,2", "--seeds", 1, "--max-steps", 30,
        "--eval-every", 10, "--out", out, "--", "--steps", 30, "--step-s", 0.15, "--fault", "raise", "--rank", 1,
    ]  # fmt: skip
    killed = start(*command)
    scratch = out / "trials" / ".all-reduce-n1-s0.partial"
    assert wait_until(lambda: is_training(scratch))
    os.kill(killed.process.pid, signal.SIGKILL)
    assert "left out: strategy single runs on 1 worker, not 2" in killed.wait()
    killed.assert_nothing_left(within_s=AGENTS_GRACE_S)
    first = out / "trials" / "single-n1-s0" / "steps.csv"
    before = (first.stat().st_mtime_ns, first.read_bytes())
    assert [path.name for path in (out / "trials").glob("[!.]*")] == ["single-n1-s0"]

    again = start(*command, COLUMNS="80")
    output = again.wait()
    assert again.status == 1, output  # for the trial that failed
    again.assert_nothing_left()
    assert (first.stat().st_mtime_ns, first.read_bytes()) == before, "a finished trial was run again"
    assert not list((out / "trials").glob(".*")), "nothing of the killed trial is left"
    assert re.search(r"^2/3 all-reduce x 1 seed 0: loss \S+, finite 1$", output, re.MULTILINE)
    assert re.search(r"^3/3 all-reduce x 2 seed 0: failed: worker 1 .*broken on purpose", output, re.MULTILINE)
    assert f"Report: {out / 'report.html'}" in output
    assert (out / "report.html").stat().st_size > 100_000

    frames = Study.open(out).frames
    assert frames.trials["status"].tolist() == ["finished", "finished", "failed"]
    assert "broken on purpose" in frames.trials["reason"][2]
    for name in ("trials", "evaluations", "workers", "summary"):
        frame = getattr(frames, name).query("workers == 1")
        kept, redone = (without_times(frame[frame["strategy"] == strategy]) for strategy in ("single", "all-reduce"))
        assert len(kept.columns) > 5
        pd.testing.assert_frame_equal(kept, redone)


def without_times(frame: pd.DataFrame) -> pd.DataFrame:
    """What was trained, without how fast, and without the strategy's name."""
    timing = re.compile(r"(^|_)s(_|$)|_per_s|share|^used_by_others$|^strategy$|^trial$|^base_strategy$")
    return frame[[column for column in frame.columns if not timing.search(column)]].reset_index(drop=True)
