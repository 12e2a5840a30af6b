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
@pytest.mark.timeout(600)
def test_demo(start, tmp_path: Path) -> None:
    command = start("demo", "--out", tmp_path / "demo", COLUMNS="80")
    output = command.wait(timeout_s=540)
    assert command.status == 0, output
    ended = re.findall(r"^\d+/12 (\S+) x (\d) seed (\d): accuracy (\d\.\d+) after \S+ s$", output, re.MULTILINE)
    assert [(name, workers, seed) for name, workers, seed, _ in ended] == [
        (name, workers, seed) for seed in "01" for name in ("all-reduce", "ps-bsp", "ps-asp") for workers in "12"
    ]
    assert all(float(accuracy) >= 0.95 for *_, accuracy in ended)
    table = output[output.index("strategy") :]
    assert len(re.findall(r"^ ?(?:all-reduce|ps-\w+) +[12] +2/2 ", table, re.MULTILINE)) == 6
    assert all(len(line) <= 80 for line in table.splitlines() if "Report:" not in line)
    fastest = Study.open(tmp_path / "demo").frames.summary.sort_values("time_to_target_s").iloc[0]
    said = " ".join(table.split())
    assert f"Reach accuracy 0.95 fastest with {fastest['strategy']} on {fastest['workers']} worker" in said
    assert f"Report: {tmp_path / 'demo' / 'report.html'}" in said
    command.assert_nothing_left()
