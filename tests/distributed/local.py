"""Runs in this process's Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paceline
from paceline import Result
from paceline.engines.standing import Progress
from paceline.records import Record


class Listener:
    """Keeps what scripts print, what is recorded, and how far the run was when last told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.records: list[Record] = []
        self.progress = Progress()

    def on_progress(self, progress: Progress) -> None:
        self.progress = progress

    def on_output(self, who: str, line: str) -> None:
        self.lines.append((who, line))

    def on_records(self, records: Sequence[Record]) -> None:
        self.records += records

    def of(self, who: str) -> list[str]:
        return [line for speaker, line in self.lines if speaker == who]


def run_text(directory: Path, text: str, *, listener: Listener | None = None, **options: Any) -> Result:
    """Run a script given as text."""
    script = directory / "script.py"
    script.write_text(text)
    return paceline.run(script, out=directory / "out", watcher=listener or Listener(), **options)
