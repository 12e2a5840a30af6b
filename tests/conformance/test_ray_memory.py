"""What runs on Ray leave in the process that launches them, as a notebook does: no descriptor, and little memory."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

import paceline
from tests.conformance.rows import launched, train
from tests.memory import held_bytes

NUM_RUNS = 6
MAX_GROWTH_BYTES = 8_000_000
"""Ray's own bookkeeping of five runs; an actor class that is made anew for each member takes as much again."""

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_here")]


def test_many_runs_leave_no_descriptors_and_little_memory(tmp_path: Path) -> None:
    num_open, resident_bytes = [], []
    for number in range(NUM_RUNS):
        program = partial(launched, partial(train, num_epochs=1), tmp_path)
        paceline.run(program, strategy="ps-asp", workers=2, out=tmp_path / str(number))
        resident_bytes.append(held_bytes())
        num_open.append(len(os.listdir("/proc/self/fd")))
    assert num_open[-1] - num_open[0] < NUM_RUNS - 1  # Ray itself opens and closes one or two meanwhile
    assert resident_bytes[-1] - resident_bytes[0] < MAX_GROWTH_BYTES
