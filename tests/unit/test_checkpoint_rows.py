"""Rows that servers have written beside checkpoints: which are removed, which are damage, and what names none."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from paceline import durable, sealing
from paceline.checkpoint import FILE_NAME, Checkpoint, DamagedCheckpoint
from paceline.checkpoint_files import CheckpointFiles, copy_newest
from paceline.config import Best
from paceline.errors import UsageError
from paceline.row_file import RowFile
from paceline.running import resuming
from paceline.server.tables import row_files
from paceline.server.tables.row_optimizers import of_text
from paceline.server.tables.spec import RowGradients, TableSpec
from paceline.server.tables.table import Table
from paceline.training import row_tables, snapshot
from paceline.training.checkpoints import Checkpoints
from paceline.training.row_tables import Written
from paceline.training.snapshot import Snapshot


def rows_at(directory: Path, iteration: int) -> tuple[str, dict[str, list[RowFile]]]:
    table = Table(TableSpec("users", 100, 2, of_text("sgd"), 1.0, seed=1))
    table.update(RowGradients(torch.arange(4), torch.ones(4, 2)))
    name = f"rows-{iteration}-0123abcd"
    return name, {"users": table.save(directory / name)}


def saved(directory: Path, iteration: int, **changes: Any) -> bytes:
    name, files = rows_at(directory, iteration)
    own: dict[str, Any] = {"rows_directory": name, "row_files": files, "metrics": {"x": float(iteration)}, **changes}
    return Checkpoint(iteration, 1.0, {}, {}, [], [], 0, **own).encode()


def rows_in(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("rows-*")}


def refuse(number: int) -> Any:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize("links", [True, False])
def test_a_copy_has_the_rows_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse(errno.EXDEV))
    run, copy = tmp_path / "run", tmp_path / "copy"
    for directory in (run, copy):
        directory.mkdir()
    for iteration in (1, 2):
        CheckpointFiles(run).write([saved(run, iteration)])
    copy_newest(run, copy)
    shutil.rmtree(run)
    assert resuming.find(copy).checkpoint.iteration == 2  # with all that it names, whole
    assert rows_in(copy) == {"rows-2-0123abcd"}


def test_a_copy_of_a_run_that_goes_on_is_of_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    for directory in (run, copy):
        directory.mkdir()
    CheckpointFiles(run).write([saved(run, 1)])
    copied = shutil.copyfile

    def goes_on(source: Any, target: Any) -> Any:
        made = copied(source, target)
        monkeypatch.setattr(shutil, "copyfile", copied)
        for iteration in (2, 3):
            CheckpointFiles(run).write([saved(run, iteration)])
        return made

    monkeypatch.setattr(shutil, "copyfile", goes_on)
    copy_newest(run, copy)
    assert resuming.find(copy).checkpoint.iteration == 3
    assert rows_in(copy) == {"rows-3-0123abcd"}


def test_a_copy_without_the_rows_is_none(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    for directory in (run, copy):
        directory.mkdir()
    CheckpointFiles(run).write([saved(run, 1)])
    shutil.rmtree(run / "rows-1-0123abcd")
    with pytest.raises(FileNotFoundError, match="rows-1-0123abcd"):
        copy_newest(run, copy)


def test_rows_go_with_the_checkpoints_that_name_them(tmp_path: Path) -> None:
    (tmp_path / "rows-2024-01").mkdir()  # the user's
    for iteration in (1, 2, 3):
        CheckpointFiles(tmp_path, keep=2).write([saved(tmp_path, iteration)])
    assert rows_in(tmp_path) == {"rows-2024-01", "rows-2-0123abcd", "rows-3-0123abcd"}


@pytest.mark.parametrize("function", ["also", "sync"])
def test_a_write_that_fails_late_keeps_the_rows_of_what_is_there(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`also`: once the checkpoint has its name; `sync`: before."""
    files = CheckpointFiles(tmp_path, keep=1, best=Best("x", True))
    files.write([saved(tmp_path, 1)])
    content = saved(tmp_path, 2)
    monkeypatch.setattr(durable, function, refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        files.write([content])
    newest = resuming.find(tmp_path).checkpoint
    assert newest.iteration == (2 if function == "also" else 1)
    assert newest.rows_directory in rows_in(tmp_path)
    assert ("rows-2-0123abcd" in rows_in(tmp_path)) == (function == "also")


def test_while_one_cannot_be_read_no_rows_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = CheckpointFiles(tmp_path, keep=1)
    files.write([saved(tmp_path, 1)])
    content = saved(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(sealing, "facts_of", refuse(errno.EMFILE))
        files.write([content])
    assert rows_in(tmp_path) == {"rows-1-0123abcd", "rows-2-0123abcd"}
    files.write([saved(tmp_path, 3)])
    assert rows_in(tmp_path) == {"rows-3-0123abcd"}


def test_a_fact_of_another_type_names_no_rows(tmp_path: Path) -> None:
    name, _ = rows_at(tmp_path, 1)
    CheckpointFiles(tmp_path).write([Checkpoint(1, 1.0, {}, {}, [], [], 0, rows_directory=[name]).encode()])  # type: ignore[arg-type]
    assert rows_in(tmp_path) == set()


def test_only_what_is_gone_or_changed_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CheckpointFiles(tmp_path).write([saved(tmp_path, 1)])
    CheckpointFiles(tmp_path).write([saved(tmp_path, 2)])
    (file,) = (tmp_path / "rows-2-0123abcd").iterdir()
    read = Path.read_bytes
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: refuse(errno.EIO)() if path == file else read(path))
        with pytest.raises(UsageError, match=f"cannot read rows from {file}: Input/output"):
            resuming.find(tmp_path)
    file.unlink()
    os.mkfifo(file)
    found = resuming.find(tmp_path)
    assert found.checkpoint.iteration == 1
    assert f"cannot read rows from {file}: there is no such file" in found.warnings[0]


def test_going_back_removes_the_rows_of_the_end(tmp_path: Path) -> None:
    CheckpointFiles(tmp_path).write([saved(tmp_path, 1)])
    (tmp_path / "rows.safetensors").write_bytes(b"")
    resuming.drop_later(resuming.find(tmp_path))
    assert not (tmp_path / "rows.safetensors").exists()


FILE = ["table-0-server-0-0.pt", 0, 1, "0" * 64]
DIRECTORY = "rows-1-0123abcd"


@pytest.mark.parametrize(
    ("directory", "files", "error"),
    [
        ("/dev", {"users": [FILE]}, "rows do not lie in '/dev'"),
        ("../..", {}, "rows do not lie in"),
        ("", {"users": [FILE]}, "rows do not lie in ''"),
        (7, {}, "rows do not lie in 7"),
        (DIRECTORY, [FILE], "not given by table"),
        (DIRECTORY, {"users": 3}, "not given by table"),
        (DIRECTORY, {"users": [["zero", *FILE[1:]]]}, "names no file of rows"),
        (DIRECTORY, {"users": [FILE[:3]]}, "names no file of rows"),
        (DIRECTORY, {"users": [3]}, "names no file of rows"),
        (DIRECTORY, {"users": [[FILE[0], 1, 1, FILE[3]]]}, "names no file of rows"),
        (DIRECTORY, {"users": [[FILE[0], "0", 1, FILE[3]]]}, "names no file of rows"),
        (DIRECTORY, {"users": [[FILE[0], 0, 1, None]]}, "names no file of rows"),
        (DIRECTORY, {"users": [[FILE[0], 0, 2, FILE[3]]]}, "'users' are not those of all servers"),
        (DIRECTORY, {"users": []}, "'users' are not those of all servers"),
    ],
)
def test_what_names_no_rows_is_refused(directory: Any, files: Any, error: str, tmp_path: Path) -> None:
    content = Checkpoint(1, 1.0, {}, {}, [], [], 0).plain() | {"rows_directory": directory, "row_files": files}
    with pytest.raises(ValueError, match=error):
        Checkpoint.of_plain(content)


def test_shortened_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(saved(tmp_path, 1, row_files={"users": []}))
    with pytest.raises(DamagedCheckpoint, match=rf"{path} is no checkpoint.*not those of all servers"):
        resuming.find(tmp_path)


@pytest.mark.parametrize("value", [torch.ones(2, 2), 3], ids=["length", "type"])
def test_a_file_with_other_things_in_it_is_named(value: Any, tmp_path: Path) -> None:
    directory = tmp_path / DIRECTORY
    directory.mkdir()
    path = directory / FILE[0]
    torch.save({"keys": torch.arange(3), "rows": value}, path)
    file = RowFile(path.name, 0, 1, hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(row_files.DamagedRows, match=f"{path} has no rows"):
        list(row_files.read(directory, [file], server=0, num_servers=1))


@pytest.mark.parametrize(("rows", "wanted_s"), [(Written(DIRECTORY, {}), (70.0, 30.0)), (None, (30.0, 30.0))])
def test_rows_that_take_long_are_rarely_written(
    rows: Written | None, wanted_s: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers wait meanwhile: 10 times as long, of which a pause is early by a fifth. Without rows it is 30 s."""
    clock_s, took_s = [100.0], [7.0, 0.1]
    run: Any = SimpleNamespace(
        goes_on_by="",
        reporter=SimpleNamespace(keeps_files=True),
        context=SimpleNamespace(collective=None, is_first=True, pacing=SimpleNamespace(now_s=lambda: clock_s[0])),
    )
    saving, own = Checkpoints(run), cast(Snapshot, None)

    def written(_: object) -> Written | None:
        clock_s[0] += took_s.pop(0)
        return rows

    monkeypatch.setattr(snapshot, "gather_workers", lambda *_: [])
    monkeypatch.setattr(row_tables, "write_rows", written)
    monkeypatch.setattr(saving, "made", lambda *_, **_options: None)
    monkeypatch.setattr(saving, "_write", lambda *_, **_options: None)
    for wanted in wanted_s:
        saving.save(nn.Linear(1, 1), own, 0.0, metrics={}, is_last=True)
        assert saving.due_in_s == pytest.approx(0.8 * wanted)
