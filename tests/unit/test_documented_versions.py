"""The versions that the documentation says were tried together are those that tests have."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = "docs/frameworks.md"


def pinned(path: str) -> dict[str, str]:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def series(version: str) -> str:
    """Without the patch."""
    return ".".join(version.split(".")[:2])


def test_versions_tried_together_are_those_of_the_constraints() -> None:
    _, section = (ROOT / PAGE).read_text(encoding="utf-8").split("## Versions tried together\n")
    names, _, versions = ([cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"\|.*", section))
    own = pinned("constraints.txt")
    assert len(names) == 8
    assert dict(zip(names, versions, strict=True)) == {name: series(own[name]) for name in names}


def test_tensorflow_s_environment_has_what_the_page_says() -> None:
    _, section = (ROOT / PAGE).read_text(encoding="utf-8").split("## Versions tried together\n")
    own = pinned("tests/environments/tensorflow.txt")
    assert f"tensorflow-cpu {series(own['tensorflow-cpu'])} " in section
    assert f"h5py of {series(own['h5py'])}," in section
