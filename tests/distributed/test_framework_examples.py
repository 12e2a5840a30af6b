"""The examples for Lightning, Accelerate and Transformers learn."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

MISSING = [name for name in ("lightning", "accelerate", "transformers") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)}: not installed (paceline[frameworks])"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "strategy"),
    [("lightning_text", "ps-asp"), ("accelerate_text", "local-sgd:every=8"), ("trainer_text", "local-sgd:every=8")],
)
@pytest.mark.usefixtures("forked_programs")
def test_an_example_learns(example: str, strategy: str, tmp_path: Path) -> None:
    command = ["paceline", "run", str(EXAMPLES / f"{example}.py"), "--strategy", strategy, "--workers", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (accuracy,) = re.findall(r"accuracy (\S+) .*on 2 workers", done.stdout + done.stderr)
    assert float(accuracy) > 0.9
