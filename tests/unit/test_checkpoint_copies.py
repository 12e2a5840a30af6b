"""Copies of checkpoints at an address: what is there, what a run goes on from, and what becomes of errors."""

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
import torch
from fsspec.implementations.memory import MemoryFileSystem

import paceline
from paceline.checkpoint import Checkpoint
from paceline.checkpoint_files import CheckpointFiles
from paceline.errors import RunFailed, UsageError
from paceline.models import build
from paceline.running import checkpoint_copies
from paceline.running.checkpoint_copies import CheckpointCopies, NothingThere
from tests.distributed.harness import wait_until
from tests.distributed.local import Listener
from tests.unit.test_checkpoint_files import checkpoint_of, flip

ADDRESS = "memory://bucket/run-7"


@pytest.fixture(autouse=True)
def memory() -> Iterator[MemoryFileSystem]:
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def names(files: MemoryFileSystem) -> set[str]:
    return {Path(path).name for path in files.ls("/bucket/run-7", detail=False)}


@contextmanager
def copied(directory: Path, *, keep: int = 2) -> Iterator[CheckpointFiles]:
    said: list[str] = []
    copies = CheckpointCopies(ADDRESS, directory, keep=keep)
    copies.claim({"id": "a"}, iteration=0, drops_later=False)
    with copies.kept(said.append):
        yield CheckpointFiles(directory, keep=keep)
    assert said == []


@pytest.mark.parametrize(("keep", "kept"), [(1, {9}), (2, {6, 9}), (5, {3, 6, 9})])
def test_as_many_are_kept_there_as_here(tmp_path: Path, memory: MemoryFileSystem, keep: int, kept: set[int]) -> None:
    with copied(tmp_path, keep=keep) as files:
        for iteration in (3, 6, 9):
            files.write([checkpoint_of(iteration)])
            name = f"checkpoint-{iteration}.pt"
            assert wait_until(lambda name=name: name in names(memory))  # type: ignore[misc]
    assert names(memory) == {"manifest.json", *(f"checkpoint-{iteration}.pt" for iteration in kept)}
    found = checkpoint_copies.find(ADDRESS)
    assert (found.where, found.checkpoint.iteration) == (f"{ADDRESS}/checkpoint-9.pt", 9)
    assert found.raw == (tmp_path / "checkpoint.pt").read_bytes()


def test_the_last_one_is_waited_for(tmp_path: Path, memory: MemoryFileSystem) -> None:
    with copied(tmp_path) as files:
        for iteration in range(1, 9):
            files.write([checkpoint_of(iteration)])
    assert "checkpoint-8.pt" in names(memory)
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_copy_is_named_and_the_one_before_is_taken(memory: MemoryFileSystem) -> None:
    for iteration in (4, 5):
        memory.pipe_file(f"/bucket/run-7/checkpoint-{iteration}.pt", checkpoint_of(iteration))
    whole = memory.cat_file("/bucket/run-7/checkpoint-5.pt")
    memory.pipe_file("/bucket/run-7/checkpoint-5.pt", whole[: len(whole) // 2])  # its writer was cut off
    found = checkpoint_copies.find(ADDRESS)
    assert found.checkpoint.iteration == 4
    assert f"{ADDRESS}/checkpoint-5.pt" in found.warnings[0]
    assert found.warnings[0].endswith(f"the run goes on from {ADDRESS}/checkpoint-4.pt")
    assert checkpoint_copies.find(ADDRESS, "4").checkpoint.iteration == 4


@pytest.mark.parametrize(
    ("which", "said"),
    [
        (3, f"{ADDRESS} has no checkpoint of iteration 3; there are 4, 5"),
        ("last", "--from must be newest, best or an iteration"),
        ("best", "not of the best"),
    ],
)
def test_what_is_not_there_is_said(memory: MemoryFileSystem, which: str | int, said: str) -> None:
    with pytest.raises(NothingThere, match="has no checkpoint to go on from"):
        checkpoint_copies.find(ADDRESS)
    for iteration in (4, 5):
        memory.pipe_file(f"/bucket/run-7/checkpoint-{iteration}.pt", checkpoint_of(iteration))
    with pytest.raises(UsageError, match=said):
        checkpoint_copies.find(ADDRESS, which)


@pytest.mark.parametrize("address", ["gopher://there/run", "s3//x://"])
def test_an_address_that_nobody_knows_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(UsageError, match=f"cannot reach {address}"):
        CheckpointCopies(address, tmp_path, keep=2)


@pytest.mark.parametrize(
    "address", ["sftp://me:secret@host/run", "simplecache::ftp://me:secret@host/run", "ftp://host/run?password=secret"]
)
def test_a_password_is_not_shown(tmp_path: Path, address: str) -> None:
    with pytest.raises(UsageError, match="leave the password out") as refused:
        CheckpointCopies(address, tmp_path, keep=2)
    assert "secret" not in str(refused.value)


def test_what_is_no_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--copy-checkpoints {tmp_path}: give an address, as file://{tmp_path}"):
        CheckpointCopies(str(tmp_path), tmp_path, keep=2)


def test_an_address_is_one_runs_from_its_start_on(tmp_path: Path, memory: MemoryFileSystem) -> None:
    """Before the first checkpoint, too; and where somebody has removed the manifest."""
    copies = CheckpointCopies(ADDRESS, tmp_path, keep=2)
    copies.claim({"id": "a"}, iteration=0, drops_later=False)
    with pytest.raises(UsageError, match=f"is another run's; give an empty address, or --resume {ADDRESS}"):
        copies.claim({"id": "b"}, iteration=0, drops_later=False)
    memory.pipe_file("/bucket/run-7/checkpoint-5.pt", checkpoint_of(5))
    memory.rm("/bucket/run-7/manifest.json")
    with pytest.raises(UsageError, match="is another run's"):
        copies.claim({"id": "a"}, iteration=5, drops_later=False)
    assert names(memory) == {"checkpoint-5.pt"}


def test_later_copies_go_when_there_is_a_new_one(tmp_path: Path, memory: MemoryFileSystem) -> None:
    for iteration in (4, 6, 8):
        memory.pipe_file(f"/bucket/run-7/checkpoint-{iteration}.pt", checkpoint_of(iteration))
    memory.pipe_file("/bucket/run-7/manifest.json", b'{"id": "a"}')
    copies = CheckpointCopies(f"{ADDRESS}/", tmp_path, keep=2)
    with pytest.raises(UsageError, match=f"later checkpoint, of iteration 8: --resume {ADDRESS} goes .*--from 4 goes"):
        copies.claim({"id": "a"}, iteration=4, drops_later=False)
    copies.claim({"id": "a"}, iteration=4, drops_later=True)
    assert checkpoint_copies.find(ADDRESS).checkpoint.iteration == 8, "the run may fail before it has another"
    again = Checkpoint(6, 1.0, {"w": torch.zeros(2000)}, {}, [], [], 0)
    with copies.kept(lambda _: None):
        CheckpointFiles(tmp_path).write([again.encode()])
    assert names(memory) == {"manifest.json", "checkpoint-4.pt", "checkpoint-6.pt"}
    assert checkpoint_copies.find(ADDRESS).checkpoint.model["w"].sum() == 0


class _Full(MemoryFileSystem):  # type: ignore[misc]
    """Has no room for checkpoints, but for those after `room` was made."""

    protocol = "full"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its parent's, of all instances
    room = threading.Event()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb" and not self.room.is_set():
            raise OSError(28, "No space left on device")
        return super()._open(path, mode, **options)


fsspec.register_implementation("full", _Full, clobber=True)


def test_a_full_place_is_said_and_the_next_checkpoint_is_tried(tmp_path: Path) -> None:
    _Full.room.clear()
    said: list[str] = []
    copies = CheckpointCopies("full://bucket/run", tmp_path, keep=2)
    with copies.kept(said.append):
        files = CheckpointFiles(tmp_path, keep=2)
        files.write([checkpoint_of(1)])
        assert wait_until(lambda: said)
        _Full.room.set()
        files.write([checkpoint_of(2)])
    assert said == [
        "a checkpoint is not copied to full://bucket/run: OSError: [Errno 28] No space left on device",
    ]
    assert checkpoint_copies.find("full://bucket/run").checkpoint.iteration == 2


def test_a_run_whose_last_checkpoint_is_not_copied_has_failed(tmp_path: Path) -> None:
    _Full.room.clear()
    copies = CheckpointCopies("full://bucket/run", tmp_path, keep=2)
    told = rf"ended well, but its last checkpoint is in {tmp_path}, and not at full://bucket/run: OSError: .* No space"
    with pytest.raises(RunFailed, match=told), copies.kept(lambda _: None):
        CheckpointFiles(tmp_path).write([checkpoint_of(1)])


def test_what_ends_a_run_is_what_is_told(tmp_path: Path) -> None:
    _Full.room.clear()
    copies = CheckpointCopies("full://bucket/run", tmp_path, keep=2)

    def fail() -> None:
        with copies.kept(lambda _: None):
            CheckpointFiles(tmp_path).write([checkpoint_of(2)])
            raise OSError("the run's own")

    with pytest.raises(OSError, match="the run's own"):
        fail()


def train(max_epochs: int = 2) -> None:
    worker = paceline.init()
    model = build("digitsnet")
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.arange(64) % 10), 8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for _ in range(max_epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()


def run(out: Path, **options: Any) -> Checkpoint:
    paceline.run(train, workers=2, engine="virtual", cluster="lab-1gbe", out=out, **options)
    return Checkpoint.decode((out / "checkpoint.pt").read_bytes(), where="")


def test_a_run_goes_on_from_its_copies_alone(tmp_path: Path, memory: MemoryFileSystem) -> None:
    whole = run(tmp_path / "whole")
    listener = Listener()
    for machine, max_steps in (("first", 3), ("second", None)):  # the same command on one machine after the other
        resumed = run(
            tmp_path / machine, resume=ADDRESS, copy_checkpoints=f"{ADDRESS}/", max_steps=max_steps, watcher=listener
        )
    assert listener.of("run") == [f"{ADDRESS} has no checkpoint yet: the run begins"]
    assert resumed.iteration == whole.iteration == 8
    for name, tensor in whole.model.items():
        assert torch.equal(tensor, resumed.model[name])
    assert names(memory) == {"manifest.json", "checkpoint-3.pt", "checkpoint-8.pt"}
    with pytest.raises(UsageError, match="is another run's"):
        run(tmp_path / "third", copy_checkpoints=ADDRESS)
    with pytest.raises(UsageError, match="later checkpoint, of iteration 8"):
        run(tmp_path / "first", resume=tmp_path / "first", max_steps=5, copy_checkpoints=ADDRESS)
    run(tmp_path / "back", resume=ADDRESS, resume_from=3, max_steps=5, copy_checkpoints=ADDRESS)
    assert names(memory) == {"manifest.json", "checkpoint-3.pt", "checkpoint-5.pt"}


def test_a_run_that_has_ended_is_copied_when_it_is_resumed(tmp_path: Path, memory: MemoryFileSystem) -> None:
    run(tmp_path / "out", max_steps=3)
    run(tmp_path / "out", max_steps=3, resume=tmp_path / "out", copy_checkpoints=ADDRESS)
    assert names(memory) == {"manifest.json", "checkpoint-3.pt"}


def test_rows_in_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="copies no rows that servers have in files"):
        paceline.run(
            train, strategy=f"ps-bsp:table_dir={tmp_path}", workers=1, copy_checkpoints=ADDRESS, out=tmp_path / "out"
        )


def test_flipped_bits_of_a_copy_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1.pt"
    path.write_bytes(checkpoint_of(1))
    flip(path)
    with pytest.raises(UsageError, match=r"checkpoint-1\.pt"):
        checkpoint_copies.find(f"file://{tmp_path}")


# --- places that fail -------------------------------------------------------------------------------------------------


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
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
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
def test_a_run_goes_on_where_the_manifest_has_been_lost(tmp_path: Path, memory: MemoryFileSystem, is_torn) -> None:
    run(tmp_path / "first", max_steps=3, copy_checkpoints=ADDRESS)
    whole = memory.cat_file("/bucket/run-7/manifest.json")
    memory.rm("/bucket/run-7/manifest.json")
    if is_torn:
        memory.pipe_file("/bucket/run-7/manifest.json", whole[:20])
    with pytest.raises(UsageError, match="is another run's"):
        run(tmp_path / "other", max_steps=3, copy_checkpoints=ADDRESS)
    assert run(tmp_path / "second", resume=ADDRESS, copy_checkpoints=ADDRESS).iteration == 8
    assert checkpoint_copies.id_of(ADDRESS) is not None


def test_a_manifest_that_is_lost_meanwhile_is_written_again(tmp_path: Path, memory: MemoryFileSystem) -> None:
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
