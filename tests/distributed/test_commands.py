"""`paceline demo` and `paceline doctor`, as a user starts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline import Study

pytestmark = pytest.mark.ray


def test_doctor_finds_nothing_wrong_with_a_healthy_machine(start) -> None:
    command = start("doctor")
    output = command.wait()
    assert command.status == 0, output
    assert output.rstrip().endswith("Everything is in order.")
    assert "bad" not in output
    assert re.search(r"^ok +local Ray: 1 host\(s\)$", output, re.MULTILINE)
    command.assert_nothing_left()


def test_doctor_of_a_cluster_that_is_not_there(start) -> None:
    command = start("doctor", "--address", "127.0.0.1:1")
    output = command.wait()
    assert command.status == 1
    assert re.search(r"^bad +Ray at 127.0.0.1:1: cannot connect", output, re.MULTILINE)
    assert "remedy:" in output
    assert "Traceback" not in output
    command.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo(start, tmp_path: Path) -> None:
    command = start("demo", "--out", tmp_path / "demo", COLUMNS="80")
    output = command.wait(timeout_s=840)
    assert command.status == 0, output
    ended = re.findall(r"^\d/6 (\S+) x (\d) seed 0: accuracy (\d\.\d+) after (?:\d+ min )?\S+ s", output, re.MULTILINE)
    strategies = ("all-reduce", "ps-bsp", "ps-asp")
    assert [(name, workers) for name, workers, _ in ended] == [
        (name, workers) for counts in ("12", "18") for name in strategies for workers in counts
    ]
    assert all(float(accuracy) >= 0.9 for *_, accuracy in ended)  # the last one's, which may be below the target
    assert output.index("2. The same script on a simulated laboratory") < output.index("8 seed 0")
    for name in ("this-machine", "simulated-lab"):
        summary = Study.open(tmp_path / "demo" / name).frames.summary
        assert (summary["reached"] == 1).all()
    times = summary.set_index(["strategy", "workers"])["time_to_target_s"]
    assert times[:, 8].max() > 1.5 * times[:, 8].min(), "strategies differ on eight hosts"
    assert f"Report: {tmp_path / 'demo' / 'report.html'}" in output
    report = (tmp_path / "demo" / "report.html").read_text()
    assert "this-machine" in report
    assert "simulated-lab" in report
    command.assert_nothing_left()
