"""What the command line loads, and what its list of commands says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline import data
from paceline.cli import commands
from paceline.cluster.reading import shipped


@pytest.mark.slow
def test_a_command_that_draws_nothing_does_not_load_plotly() -> None:
    code = (
        "import sys; from paceline.cli import commands; [commands.load(name) for name in commands.SUMMARIES]; "
        "sys.exit(any(name.startswith('plotly') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line where torch, Ray and pandas cannot be imported."""
    code = "import sys; sys.modules |= dict.fromkeys(('torch', 'ray', 'pandas')); from paceline import cli; cli.main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_what_runs_nothing_loads_nothing(argument: str) -> None:
    assert without_torch(argument).returncode == 0


def test_a_missing_package_is_named() -> None:
    ended = without_torch("doctor")
    assert ended.returncode == 1
    assert ended.stderr.startswith("bad  torch: ")
    assert "remedy: pip install" in ended.stderr


@pytest.mark.parametrize("name", commands.SUMMARIES)
def test_the_list_of_commands_says_what_each_ones_help_does(name: str) -> None:
    loaded = commands.load(name)
    assert loaded.name == name
    summary, _, _ = (loaded.help or "").partition("\n\n")
    assert " ".join(summary.split()) == commands.SUMMARIES[name]


def test_run_is_understood_before_torch_is_loaded() -> None:
    code = (
        "import sys; from paceline.cli import commands; commands.load('run'); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'pandas')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("engine", "starts"), [("ray", True), pytest.param("virtual", False, marks=pytest.mark.slow)])
def test_ray_starts_before_torch_is_loaded_and_a_run_begins_after_both(engine: str, starts: bool) -> None:
    code = f"""
import contextlib, sys
from paceline.cli import beginning
seen = []
@contextlib.contextmanager
def connected(address, *, insecure, num_workers):
    seen.append((address, num_workers, "paceline.running.result" in sys.modules))
    yield
    seen.append("ended")
beginning.connected = connected
with beginning.ray_beside_imports(engine={engine!r}, address="there", insecure=False, num_workers=3):
    assert "paceline.running.launch" in sys.modules
    assert "ended" not in seen
assert seen == ([("there", 3, False), "ended"] if {starts} else []), seen
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_names_clusters_and_data_sets() -> None:
    assert set(commands.DATA_SETS) == set(data.NAMES)
    said = without_torch("--help").stdout
    assert all(name in said for name in (*shipped(), *data.NAMES))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("comp", {"compare"}),
        ("run train.py --strat", {"--strategy"}),
        ("run train.py --cluster lab", {"lab-1gbe"}),
        pytest.param("plan train.py --cluster v", {"volunteers"}, marks=pytest.mark.slow),
    ],
)
def test_a_shell_completes_commands_options_and_clusters(words: str, wanted: set[str]) -> None:
    code = "from paceline import cli; import sys; sys.argv = ['paceline']; cli.main()"
    asked = {"COMP_WORDS": f"paceline {words}", "COMP_CWORD": str(len(words.split()))}
    environment = os.environ | asked | {"_PACELINE_COMPLETE": "complete_bash"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert set(ended.stdout.split()) == wanted, ended.stderr
