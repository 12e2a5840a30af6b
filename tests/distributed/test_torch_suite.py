"""torch's own distributed suite passes over the backend `paceline`, but for what `torch_suite.LEFT_OUT` names."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

PASSED_AT_LEAST = 100
"""119 do with torch 2.13; far fewer would mean that its tests leave themselves out."""


@pytest.mark.slow
@pytest.mark.timeout(900)  # 160 s on two cores that others share
def test_torchs_own_suite_passes() -> None:
    command = [sys.executable, "-m", "tests.distributed.torch_suite"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:]
    passed = re.search(r"^(\d+) passed, 0 failed$", done.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) >= PASSED_AT_LEAST
