"""Files that are still whole after a power cut: on the disk before a name says that they are there."""

from __future__ import annotations

import os
from pathlib import Path


def replace(source: Path, target: Path) -> None:
    """Give a file, or a directory with all that is in it, its final name; both are in the same directory."""
    for path in [*source.rglob("*"), source] if source.is_dir() else [source]:
        _sync(path)
    os.replace(source, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
