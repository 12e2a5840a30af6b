"""The table of published rounds, with a few rounds of one of its cells."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "federated" / "mcmahan.py"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_cell_is_counted_and_its_study_goes_on(data_directory: Path, tmp_path: Path) -> None:
    """The first time in full, the second time from what is there."""
    command = ["python", str(RECIPE), "table-1", "--only", "1", "--seeds", "1", "--most", "0.05"]
    for _ in range(2):
        done = subprocess.run(
            [*command, "--rates", "0.1", "--out", str(tmp_path)], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        row = done.stdout.splitlines()[-2].split("│")[1:-1]
        assert [cell.strip() for cell in row] == ["0.1", "1", "10", "iid", "lr=0.1", "0 of 1 arrived", "", "87"]
    (study,) = tmp_path.iterdir()
    assert len(list((study / "trials").iterdir())) == 1  # one rate needs no run that chooses it
