"""Which checkpoints a directory keeps, and which one a run goes on from."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import checkpoint_files, durable
from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.checkpoint_files import BEST_NAME, CheckpointFiles, from_newest, go_back, iteration_of
from paceline.config import Best
from paceline.errors import UsageError
from paceline.running import resuming
from tests.forks import FORKS


def checkpoint_of(iteration: int, **metrics: float) -> bytes:
    weights = {"w": torch.full((2000,), float(iteration))}
    return Checkpoint(iteration, 1.0, weights, {}, [], [], 0, metrics=metrics).encode()


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("keep", "kept"), [(1, set()), (2, {"checkpoint-12.pt"}), (3, {"checkpoint-12.pt", "checkpoint-9.pt"})]
)
def test_so_many_are_kept_from_run_to_run(tmp_path: Path, keep: int, kept: set[str]) -> None:
    for iteration in (3, 6, 9, 12, 100):
        CheckpointFiles(tmp_path, keep=keep).write([checkpoint_of(iteration)])
    assert names_in(tmp_path) == {FILE_NAME, *kept}
    assert [iteration_of(path) for path in from_newest(tmp_path)] == [100, 12, 9][:keep]
    for path in from_newest(tmp_path):
        Checkpoint.decode(path.read_bytes(), where=path.name)


values = st.one_of(st.integers(0, 5).map(float), st.just(float("nan")), st.just(float("inf")), st.none())


@settings(max_examples=40)
@given(seen=st.lists(values, max_size=8), rising=st.booleans(), keep=st.integers(1, 3))
def test_the_best_stays_whatever_comes_later(
    tmp_path_factory: pytest.TempPathFactory, seen: list[float | None], rising: bool, keep: int
) -> None:
    """The first of the best finite values; a checkpoint of a model that was not evaluated is none."""
    directory = tmp_path_factory.mktemp("run")
    for number, value in enumerate(seen, start=1):
        metrics = {} if value is None else {"score": value}
        CheckpointFiles(directory, keep=keep, best=Best("score", rising)).write([checkpoint_of(number, **metrics)])
    scored = [(v if rising else -v, -n) for n, v in enumerate(seen, start=1) if v is not None and abs(v) < 10]
    assert iteration_of(directory / BEST_NAME) == (-max(scored)[1] if scored else None)


def test_a_best_one_by_another_metric_gives_way(tmp_path: Path) -> None:
    CheckpointFiles(tmp_path, best=Best("loss", False)).write([checkpoint_of(1, loss=0.1)])
    CheckpointFiles(tmp_path, best=Best("accuracy", True)).write([checkpoint_of(2, accuracy=0.5)])
    assert iteration_of(tmp_path / BEST_NAME) == 2


def test_one_without_a_seal_is_replaced_and_not_kept(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"of an older version, or damaged")
    CheckpointFiles(tmp_path, keep=3).write([checkpoint_of(4)])
    assert names_in(tmp_path) == {FILE_NAME}


def test_a_failed_write_leaves_all_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = CheckpointFiles(tmp_path, keep=2)
    files.write([checkpoint_of(1)])
    files.write([checkpoint_of(2)])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write([checkpoint_of(3)])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_without_second_names_there_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for iteration in (1, 2):
        CheckpointFiles(tmp_path, best=Best("x", True)).write([checkpoint_of(iteration, x=float(iteration))])
    assert [iteration_of(path) for path in from_newest(tmp_path)] == [2, 1, 2]


def test_a_killed_writers_second_name_harms_no_other_file(tmp_path: Path) -> None:
    """It died between giving the newest a second name and moving that to its place."""
    files = CheckpointFiles(tmp_path, keep=2)
    files.write([checkpoint_of(1)])
    os.link(tmp_path / FILE_NAME, tmp_path / f".{FILE_NAME}.partial")
    files.write([checkpoint_of(2)])
    assert [iteration_of(path) for path in from_newest(tmp_path)] == [2, 1]
    Checkpoint.decode((tmp_path / "checkpoint-1.pt").read_bytes(), where="")


def _write_on(directory: Path) -> None:
    files = CheckpointFiles(directory, keep=2, best=Best("x", True))
    for iteration in range(1, 100_000):
        files.write([checkpoint_of(iteration, x=float(iteration % 7))])


def test_a_kill_at_any_moment_leaves_whole_ones(tmp_path: Path) -> None:
    for kill in range(4):
        process = FORKS.Process(target=_write_on, args=(tmp_path,), daemon=True)
        process.start()
        while not (tmp_path / FILE_NAME).exists():
            time.sleep(0.002)
        time.sleep(0.013 + 0.0071 * kill)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for path in from_newest(tmp_path):
            Checkpoint.decode(path.read_bytes(), where=path.name)


def test_going_back_drops_what_came_later(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, keep=4, best=Best("x", True))
    for iteration in (2, 4, 6, 8):
        files.write([checkpoint_of(iteration, x=float(iteration == 6))])
    go_back(tmp_path / "checkpoint-4.pt", iteration=4)
    assert [iteration_of(path) for path in from_newest(tmp_path)] == [4, 2]


def test_the_best_is_gone_back_to(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, keep=1, best=Best("x", True))
    for iteration in (2, 4, 6):
        files.write([checkpoint_of(iteration, x=-float(iteration))])
    found = resuming.find(tmp_path, "best")
    go_back(found.path, iteration=found.checkpoint.iteration)
    assert names_in(tmp_path) == {FILE_NAME, BEST_NAME}
    assert [iteration_of(path) for path in from_newest(tmp_path)] == [2, 2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for iteration in (2, 4, 6):
        CheckpointFiles(tmp_path, keep=3).write([checkpoint_of(iteration)])
    return tmp_path


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("num_damaged", [0, 1, 2])
def test_the_newest_whole_one_is_taken_and_damaged_ones_are_named(run: Path, num_damaged: int) -> None:
    paths = from_newest(run)
    for path in paths[:num_damaged]:
        flip(path)
    found = resuming.find(run)
    assert found.path == paths[num_damaged]
    assert found.checkpoint.iteration == 6 - 2 * num_damaged
    assert len(found.warnings) == num_damaged
    for path, warning in zip(paths, found.warnings, strict=False):
        assert warning.startswith(f"{path} is no checkpoint, or a damaged one: ")
        assert warning.endswith(f"; the run goes on from {found.path}, of iteration {found.checkpoint.iteration}")


def test_where_all_are_damaged_the_newest_is_named(run: Path) -> None:
    for path in from_newest(run):
        flip(path)
    with pytest.raises(UsageError, match=r"checkpoint\.pt is no checkpoint, or a damaged one"):
        resuming.find(run)


def test_an_iteration_is_found_wherever_it_lies(run: Path) -> None:
    assert [resuming.find(run, which).checkpoint.iteration for which in (2, "4", 6, "newest")] == [2, 4, 6, 6]
    with pytest.raises(UsageError, match="has no checkpoint of iteration 5; there are 2, 4, 6"):
        resuming.find(run, 5)
    with pytest.raises(UsageError, match="--from must be newest, best or an iteration, not 'bset'"):
        resuming.find(run, "bset")
    with pytest.raises(UsageError, match=r"cannot resume from .*best\.pt: No such file .*; give --keep-best METRIC"):
        resuming.find(run, "best")


@pytest.mark.parametrize("which", ["4", "best"])
def test_a_damaged_one_that_is_asked_for_is_refused(run: Path, which: str) -> None:
    CheckpointFiles(run, keep=3, best=Best("x", True)).write([checkpoint_of(8, x=1.0)])
    path = run / BEST_NAME if which == "best" else checkpoint_files.numbered(run, 4)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match=f"{path.name} is no checkpoint, or a damaged one"):
        resuming.find(run, which)


def test_the_best_metric_is_read() -> None:
    assert [str(Best.parse(text)) for text in ("accuracy", "loss", "loss:max", " f1 : min ")] == [
        "accuracy:max", "loss:min", "loss:max", "f1:min",
    ]  # fmt: skip
    for text in ("", "accuracy=0.9", "loss:low", ":min"):
        with pytest.raises(UsageError, match="is not of the form metric, metric:min or metric:max"):
            Best.parse(text)
