"""The example study as a directory of which only the tables were kept."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.lab.frames import Frames
from paceline.lab.spec import StudySpec
from paceline.lab.variant import Variant
from tests.lab import example_study


def save(directory: Path, frames: Frames | None = None) -> Frames:
    """Write the study; its name is the directory's."""
    directory.mkdir(parents=True)
    if frames is None:
        frames = example_study.frames(study=directory.name)
    frames.save(directory / "tables")
    spec = StudySpec(
        script="/home/user/train.py",
        script_sha256="0" * 64,
        arguments=("--lr", "0.0001"),
        strategies=tuple(Variant.parse(name) for name in ("all-reduce", "ps-bsp:servers=2", "ps-ssp", "ps-asp")),
        workers=example_study.COUNTS,
        seeds=(0, 1, 2),
        target=f"accuracy={example_study.TARGET}",
        eval_every=10,
    )
    (directory / "study.json").write_text(json.dumps({"spec": spec.to_json()}), encoding="utf-8")
    return frames
