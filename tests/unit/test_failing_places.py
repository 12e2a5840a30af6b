"""Places of checkpoints' copies that hang, lose what they are given, or have what cannot be read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from paceline.checkpoint_files import CheckpointFiles
from paceline.errors import RunFailed, UsageError
from paceline.running import checkpoint_copies
from paceline.running.checkpoint_copies import CheckpointCopies
from tests.distributed.harness import wait_until
from tests.unit.test_checkpoint_copies import ADDRESS, copied, memory, names, run  # noqa: F401  # a fixture
from tests.unit.test_checkpoint_files import checkpoint_of


@contextmanager
def standing_still(path: Path) -> Iterator[None]:
    """Whoever opens the file to write waits in the kernel until it is read, and what is written is lost."""
    os.mkfifo(path)
    try:
        yield
    finally:
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        path.unlink()  # while it is open, so that nobody else waits
        time.sleep(0.2)
        os.close(reader)


def test_a_place_that_hangs_is_told_of_and_holds_up_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_copies, "_STILL_S", 0.5)
    monkeypatch.setattr(checkpoint_copies, "_END_S", 1.5)
    there, said = tmp_path / "there", list[str]()
    there.mkdir()
    address = f"file://{there}"
    copies = CheckpointCopies(address, tmp_path, keep=2)
    copies.claim({"id": "a"}, iteration=0, drops_later=False)
    told = f"last checkpoint is in {tmp_path}, and not at {address}: nothing of it has moved for 1.5 s"

    def train() -> None:
        with copies.kept(said.append):
            files = CheckpointFiles(tmp_path, keep=2)
            files.write([checkpoint_of(1)])
            assert wait_until(lambda: said)
            files.write([checkpoint_of(2)])  # nobody waits for the copy

    with standing_still(there / "checkpoint-1.pt"), pytest.raises(RunFailed, match=told):
        train()
    assert said[:2] == [  # what is said when the place goes on, after the run's end, does not matter
        f"a copy to {address} has stood still for 0.5 s; the run goes on",
        f"copying the last checkpoint to {address}",
    ]


def test_how_long_ago_the_copy_before_was_does_not_matter_at_the_end(
    tmp_path: Path,
    memory: MemoryFileSystem,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run ends before its thread for copies has come to the last one."""
    known = CheckpointCopies._known
    monkeypatch.setattr(checkpoint_copies, "_SAY_S", 0.0)
    monkeypatch.setattr(CheckpointCopies, "_known", lambda copies: time.sleep(0.3) or known(copies))
    copies = CheckpointCopies(ADDRESS, tmp_path, keep=2)
    with copies.kept(lambda _: None):
        CheckpointFiles(tmp_path, keep=2).write([checkpoint_of(1)])
        copies._pulse._last_s -= 2 * checkpoint_copies._END_S
    assert "checkpoint-1.pt" in names(memory)


def test_a_place_that_does_not_answer_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_copies, "_ANSWER_S", 0.5)
    address = f"file://{tmp_path}"
    (tmp_path / "checkpoint-1.pt").write_bytes(checkpoint_of(1))
    with standing_still(tmp_path / "checkpoint-2.pt"), pytest.raises(UsageError, match=f"{address} has not answered"):
        checkpoint_copies.find(address)
    with (
        standing_still(tmp_path / "manifest.json"),
        pytest.raises(UsageError, match=f"{address} has not answered for 0.5 s"),
    ):
        CheckpointCopies(address, tmp_path / "out", keep=2).claim({"id": "a"}, iteration=1, drops_later=False)


class _Slow(MemoryFileSystem):  # type: ignore[misc]
    """Answers whether a file is there when it may."""

    protocol = "slow"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its parent's, of all instances
    may = threading.Event()

    def exists(self, path: str, **options: Any) -> bool:
        assert self.may.wait(60)
        return bool(super().exists(path, **options))


fsspec.register_implementation("slow", _Slow, clobber=True)


def test_a_place_that_answers_after_its_run_was_refused_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_copies, "_ANSWER_S", 0.2)
    address = "slow://bucket/run"
    copies = CheckpointCopies(address, tmp_path, keep=2)
    before = set(threading.enumerate())
    with pytest.raises(UsageError, match="has not answered"):
        copies.claim({"id": "a"}, iteration=0, drops_later=False)
    (waiting,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "paceline-awaited"]
    _Slow.may.set()
    waiting.join()
    assert _Slow.store == {}


@pytest.mark.parametrize("unreadable", ["a directory", "an unanswered link"])
def test_the_one_before_is_taken_where_the_newest_cannot_be_read(tmp_path: Path, unreadable: str) -> None:
    (tmp_path / "checkpoint-4.pt").write_bytes(checkpoint_of(4))
    if unreadable == "a directory":
        (tmp_path / "checkpoint-5.pt").mkdir()
    else:
        (tmp_path / "checkpoint-5.pt").symlink_to(tmp_path / "gone")
    found = checkpoint_copies.find(f"file://{tmp_path}")
    assert found.checkpoint.iteration == 4
    assert "checkpoint-5.pt" in found.warnings[0]
    assert found.warnings[0].endswith("checkpoint-4.pt")
    with pytest.raises(UsageError, match=r"checkpoint-5\.pt"):
        checkpoint_copies.find(f"file://{tmp_path}", 5)


class _Losing(MemoryFileSystem):  # type: ignore[misc]
    """Says that all is well, and keeps nothing that is written to it."""

    protocol = "losing"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its parent's, of all instances
    loses = threading.Event()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if mode == "wb" and self.loses.is_set():
            file.commit = lambda: None
            self.store.pop(path, None)
        return file


fsspec.register_implementation("losing", _Losing, clobber=True)


def test_a_place_that_loses_a_copy_is_noticed(tmp_path: Path) -> None:
    _Losing.loses.set()
    address, said = "losing://bucket/run", list[str]()
    copies = CheckpointCopies(address, tmp_path, keep=2)
    with copies.kept(said.append):
        files = CheckpointFiles(tmp_path, keep=2)
        size = len(checkpoint_of(1))
        files.write([checkpoint_of(1)])
        assert wait_until(lambda: said)
        _Losing.loses.clear()
        files.write([checkpoint_of(2)])
    lost = f"OSError: {size} bytes of checkpoint-1.pt were written, and it is not there"
    assert said == [f"a checkpoint is not copied to {address}: {lost}"]
    assert checkpoint_copies.find(address).checkpoint.iteration == 2


@pytest.mark.parametrize("is_torn", [False, True], ids=["lost", "torn"])
def test_a_run_goes_on_where_the_manifest_has_been_lost(tmp_path: Path, memory: MemoryFileSystem, is_torn) -> None:  # noqa: F811
    run(tmp_path / "first", max_steps=3, copy_checkpoints=ADDRESS)
    whole = memory.cat_file("/bucket/run-7/manifest.json")
    memory.rm("/bucket/run-7/manifest.json")
    if is_torn:
        memory.pipe_file("/bucket/run-7/manifest.json", whole[:20])
    with pytest.raises(UsageError, match="is another run's"):
        run(tmp_path / "other", max_steps=3, copy_checkpoints=ADDRESS)
    assert run(tmp_path / "second", resume=ADDRESS, copy_checkpoints=ADDRESS).iteration == 8
    assert checkpoint_copies.id_of(ADDRESS) is not None


def test_a_manifest_that_is_lost_meanwhile_is_written_again(tmp_path: Path, memory: MemoryFileSystem) -> None:  # noqa: F811
    with copied(tmp_path) as files:
        memory.rm("/bucket/run-7/manifest.json")
        files.write([checkpoint_of(1)])
        assert wait_until(lambda: "manifest.json" in names(memory))
    assert checkpoint_copies.id_of(ADDRESS) == "a"


KILLED = """
import sys, time
from pathlib import Path
from paceline.running import places
from paceline.running.checkpoint_copies import CheckpointCopies

pieces = places.Place._pieces

def slow(place, file):
    for number, piece in enumerate(pieces(place, file)):
        if number == 3 and Path(file.name).name.startswith(".") and Path(sys.argv[2], "checkpoint-1.pt").exists():
            print("in the midst", flush=True)
            time.sleep(600)
        yield piece

places._PIECE_BYTES = 512
copies = CheckpointCopies(f"file://{sys.argv[2]}", Path(sys.argv[1]), keep=1)
copies.claim({"id": "a"}, iteration=0, drops_later=False)
with copies.kept(print):
    while not Path(sys.argv[2], "checkpoint-1.pt").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    places.Place._pieces = slow
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_launcher_that_is_killed_in_the_midst_of_a_copy(tmp_path: Path) -> None:
    """The copy before is there, though one is kept; and the run that goes on drops what was cut off."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    files = CheckpointFiles(here, keep=1)
    files.write([checkpoint_of(1)])
    with subprocess.Popen([sys.executable, "-c", KILLED, here, there], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        files.write([checkpoint_of(2)])
        assert launcher.stdout.readline() == "in the midst\n"
        launcher.kill()
    address = f"file://{there}"
    found = checkpoint_copies.find(address)
    assert (found.checkpoint.iteration, len(found.warnings)) == (1, 1)
    assert (there / "checkpoint-2.pt").stat().st_size < (here / "checkpoint.pt").stat().st_size
    again = tmp_path / "again"
    again.mkdir()
    copies = CheckpointCopies(address, again, keep=1)
    copies.claim({"id": "a", "resumed_from": address}, iteration=1, drops_later=True)
    with copies.kept(lambda _: None):
        CheckpointFiles(again, keep=1).write([checkpoint_of(3)])
    assert sorted(path.name for path in there.iterdir()) == ["checkpoint-3.pt", "manifest.json"]
