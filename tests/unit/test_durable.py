"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from paceline import durable


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches the disk, in order."""
    calls: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        calls.append(f"sync {kind} {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def renamed(source: Any, target: Any) -> None:
        calls.append(f"name {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", renamed)
    return calls


def test_a_file_is_on_the_disk_before_its_name_and_the_name_after(tmp_path: Path, calls: list[str]) -> None:
    with durable.whole(tmp_path / "model") as partial:
        partial.write_text("new")
        assert not (tmp_path / "model").exists()
    assert calls == ["sync file .model.partial", "name model", f"sync directory {tmp_path.name}"]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model", "new")]


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("old")

    def write() -> None:
        with durable.whole(tmp_path / "model") as partial:
            partial.write_text("ne")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model", "old")]


def test_a_directory_is_named_once_all_in_it_is_on_the_disk(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / ".trial" / "deep").mkdir(parents=True)
    (tmp_path / ".trial" / "deep" / "file").write_text("x")
    durable.replace(tmp_path / ".trial", tmp_path / "trial")
    assert calls[-2:] == ["name trial", f"sync directory {tmp_path.name}"]
    assert sorted(calls[:-2]) == ["sync directory .trial", "sync directory deep", "sync file file"]
