"""The wheel as the package index gets it: built, checked, and used where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from paceline.cluster.reading import shipped

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")


def run(*command: object, cwd: Path, **environment: str) -> str:
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    done = subprocess.run([*map(str, command)], cwd=cwd, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_passes_the_index_and_works_without_a_checkout(tmp_path: Path) -> None:
    checkout, dist, empty = tmp_path / "checkout", tmp_path / "dist", tmp_path / "empty"
    shutil.copytree(ROOT / "paceline", checkout / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, checkout)
    empty.mkdir()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, checkout, cwd=empty)
    (wheel,), (_, _) = list(dist.glob("*.whl")), list(dist.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir(), cwd=empty)

    venv.create(tmp_path / "clean", with_pip=False)
    python = tmp_path / "clean" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=empty).strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=empty)
    # What the wheel needs comes from here: installing it takes minutes. Paceline's own folder is found before it.
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    paceline = python.with_name("paceline")
    assert site in Path(run(python, "-c", "import paceline; print(paceline.__file__)", cwd=empty).strip()).parents
    assert run(paceline, "--version", cwd=empty).startswith("paceline ")
    assert all(name in run(paceline, "--help", cwd=empty) for name in shipped())
    script = site / "paceline" / "demo_script.py"
    study = ("--strategies", "all-reduce:bucket_mb=1", "--workers", 2, "--seeds", 1, "--max-steps", 3)
    cluster = ("--engine", "virtual", "--cluster", "lab-1gbe")
    run(paceline, "compare", script, *study, *cluster, "--out", "study", cwd=empty)
    assert (empty / "study" / "report.html").stat().st_size > 1_000_000
