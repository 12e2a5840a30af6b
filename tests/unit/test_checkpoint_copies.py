"""Copies of checkpoints at an address: what is there, what a run goes on from, and what becomes of errors."""

from __future__ import annotations

import threading
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
    torch.testing.assert_close(resumed.model, whole.model, rtol=0, atol=0)
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
