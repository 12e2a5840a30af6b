"""Files that are there as a whole or not at all, even after a power cut."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file, which takes its name once it is complete and on the disk; what was there before stays
    until then."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # a killed process's may be another file's second name
    try:
        yield partial
        replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def also(source: Path, target: Path) -> None:
    """Give a file a second name in its directory, in place of what has that name; a copy, where the file system gives
    no second names."""
    with whole(target) as partial:
        try:
            os.link(source, partial)
        except OSError:
            shutil.copyfile(source, partial)


def replace(source: Path, target: Path) -> None:
    """Give a file, or a directory with all that is in it, its final name once it is on the disk; both are on one
    file system."""
    for path in [*source.rglob("*"), source] if source.is_dir() else [source]:
        sync(path)
    os.replace(source, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Wait until the disk has the file's content, or the directory's names. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
