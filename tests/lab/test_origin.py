"""What is said of the machines and versions that a study's trials were run with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.lab.origin import origin

DESCRIBED: dict[str, Any] = {
    "started": "2026-01-01T10:00:00+00:00",
    "versions": {"python": "3.11.9", "torch": "2.13.0", "ray": None},
    "git_commit": "abc",
    "machine": {"processor": "P", "num_cores": 2, "memory_bytes": 8e9, "system": "Linux 6", "gpus": ["G"]},
}


def write(study: Path, trial: str, **changes: Any) -> None:
    directory = study / "trials" / trial
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text(json.dumps({**DESCRIBED, **changes}))


def test_what_all_trials_agree_on_is_said_once(tmp_path: Path) -> None:
    write(tmp_path, "a-n1-s0")
    write(tmp_path, "a-n2-s0", started="2026-01-01T11:00:00+00:00")
    assert origin(tmp_path) == {
        "Machine": "P, 2 cores, 8 GB, Linux 6, G",
        "Versions": "python 3.11.9, torch 2.13.0",
        "Script's commit": "abc",
        "Started": "2026-01-01T10:00:00+00:00; the last trial 2026-01-01T11:00:00+00:00",
    }


def test_where_trials_differ_they_are_named(tmp_path: Path) -> None:
    for seed in range(5):
        write(tmp_path, f"a-n1-s{seed}")
    write(tmp_path, "b-n1-s0", versions={"python": "3.12.1"}, git_commit=None)
    facts = origin(tmp_path)
    assert facts["Machine"] == "P, 2 cores, 8 GB, Linux 6, G"
    assert facts["Versions"] == (
        "they differ: python 3.11.9, torch 2.13.0 (a-n1-s0, a-n1-s1, a-n1-s2 and 2 more); python 3.12.1 (b-n1-s0)"
    )
    assert facts["Script's commit"].endswith("; none (b-n1-s0)")


def test_trials_under_way_and_damaged_manifests(tmp_path: Path) -> None:
    write(tmp_path, "a-n1-s0")
    write(tmp_path, ".a-n2-s0.partial", git_commit="not yet")
    write(tmp_path, "a-n3-s0")
    (tmp_path / "trials" / "a-n3-s0" / "manifest.json").write_text('{"started": "20')
    facts = origin(tmp_path)
    assert facts["Script's commit"] == "abc"
    assert facts["Damaged manifests"] == "a-n3-s0"
    assert origin(tmp_path / "elsewhere") == {}
