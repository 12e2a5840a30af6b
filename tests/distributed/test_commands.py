"""`paceline demo` and `paceline doctor`, as a user starts them."""

from __future__ import annotations

import re

import pytest

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
@pytest.mark.timeout(300)
def test_demo(start) -> None:
    command = start("demo", COLUMNS="80")
    output = command.wait(timeout_s=280)
    assert command.status == 0, output
    reached = re.findall(r"^(\S+) x (\d): accuracy (\d+\.\d)% after (\d+) steps$", output, re.MULTILINE)
    assert [(name, workers) for name, workers, _, _ in reached] == [
        (name, workers) for name in ("all-reduce", "ps-bsp", "ps-async") for workers in "12"
    ]
    assert all(float(accuracy) >= 95 for _, _, accuracy, _ in reached)
    table = output[output.index("Digits to 95") :]
    assert len([line for line in table.splitlines() if line.strip().startswith(("all-reduce", "ps-"))]) == 6
    assert all(len(line) <= 80 for line in table.splitlines())
    command.assert_nothing_left()
