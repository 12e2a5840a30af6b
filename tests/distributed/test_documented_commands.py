"""Every command that README and docs show is run, in the order of the page, from a copy of the project.

Their links lead somewhere, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from paceline.aggregate import Aggregator
from paceline.attacks import Attack
from paceline.partition import Partition
from paceline.pieces import Piece, named
from paceline.roster import Sampler

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
START_COLD = ROOT / "README.md"
"""Its programs load what they use themselves; those of other pages are forked from a process that has."""
STARTS_COLD = ("paceline ticket ", "paceline serve ", "paceline join ")
"""And so do these, wherever they stand."""
RUN_HERE = ("paceline ", "python ", "torchrun ", "until ")
# What continuous integration itself runs, or what would install or measure for minutes.
NOT_HERE = ("make ", "pip install ", "git clone ", "cd ", "python benchmarks/", "sudo python benchmarks/")


def commands_of(page: Path) -> list[str]:
    """The lines of the page's shell blocks, continuation lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = re.sub(r"^\w+=\S+ ", "", "\n".join(blocks).replace("\\\n", " "), flags=re.MULTILINE).splitlines()
    return [" ".join(line.split()) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def test_every_command_is_of_a_kind_that_is_run() -> None:
    shown = [command for page in PAGES for command in commands_of(page)]
    assert len(shown) > 5
    assert [command for command in shown if not command.startswith((*RUN_HERE, *NOT_HERE))] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = {word for page in PAGES for c in commands_of(page) if c.startswith("make ") for word in c.split()[1:]}
    assert {"demo", "test"} <= shown
    for target in shown:
        assert re.search(rf"^{re.escape(target)}:", makefile, flags=re.MULTILINE), target


def relative_links_of(page: Path) -> list[str]:
    """The paths of the page's links and images, without what stands in code, on other sites or on the page itself."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    places = re.findall(r"\]\(\s*<?([^)>\s]+)|^\[[^\]]+\]:\s*<?([^>\s]+)|(?:src|href)=\"([^\"]+)", text, re.MULTILINE)
    paths = [place.split("#")[0] for found in places for place in found]
    return [unquote(path) for path in paths if path and not re.match(r"[a-z]+:", path)]


def test_relative_links_resolve() -> None:
    links = [(page, link) for page in PAGES for link in relative_links_of(page)]
    assert len(links) > 10
    broken = [f"{page.relative_to(ROOT)}: {link}" for page, link in links if not (page.parent / link).exists()]
    assert broken == []


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        ("robustness.md", Aggregator),
        ("robustness.md", Attack),
        ("federated.md", Partition),
        ("federated.md", Sampler),
    ],
)
def test_a_page_lists_every_piece_of_a_kind(page: str, kind: type[Piece]) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert [name for name in named(kind) if f"`{name}`" not in text] == []


def test_no_placeholder_is_left() -> None:
    assert [page.name for page in PAGES if "@@" in page.read_text(encoding="utf-8")] == []


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_run(page: Path, cluster: str, program_forks: str, tmp_path: Path) -> None:
    commands = [c for c in commands_of(page) if c.startswith(RUN_HERE) and not c.startswith(NOT_HERE)]
    if not commands:
        pytest.skip(f"{page.name} shows no command to run")
    trains_on_cifar10 = any("cifar10" in command or "ray_parameter_server" in command for command in commands)
    if trains_on_cifar10 and not os.environ.get("PACELINE_DATA"):
        pytest.skip("PACELINE_DATA is not set: a command of this page trains on CIFAR-10")
    for folder in ("paceline", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder)  # with what is compiled, which else each process would do
    cold = [str(Path(sys.executable).parent), os.environ["PATH"]]
    for command in commands:
        starts_cold = page == START_COLD or command.startswith(STARTS_COLD)
        path = os.pathsep.join(cold if starts_cold else [program_forks, *cold])
        environment = os.environ | {"PATH": path, "RAY_ADDRESS": cluster}
        if not starts_cold:
            environment["PYTHON_EXEC"] = os.path.join(program_forks, "python")  # what torchrun starts
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
