"""The directory of a study: whose it is, one at a time, whole on the disk, and places that cannot be written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from paceline.errors import UsageError
from paceline.lab.runner import TrialOutcome
from paceline.lab.study import Study
from tests.lab.machine import ORDER, Machine


def test_another_study_in_the_same_place_is_refused(
    machine: Machine, run: Callable[..., Study], tmp_path: Path
) -> None:
    run()
    with pytest.raises(UsageError) as refused:
        run(target="accuracy=0.6", seeds=[1, 2])
    assert str(refused.value) == (
        f"{tmp_path / 'out'} holds another study: seeds had 0 as well; target was accuracy=0.5, now accuracy=0.6; "
        "give another --out"
    )
    assert Study.open(tmp_path / "out").spec.target == "accuracy=0.5"


def test_directories_that_are_something_else(machine: Machine, run: Callable[..., Study], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(UsageError, match="is not empty and holds no study"):
        run(out=tmp_path / "mine")
    with pytest.raises(UsageError, match="cannot write results to"):
        run(out=tmp_path / "train.py" / "out")
    with pytest.raises(UsageError, match="holds no study"):
        Study.open(tmp_path / "mine")
    (tmp_path / "mine" / "study.json").write_text(json.dumps({"spec": {}}))
    with pytest.raises(UsageError, match="not a study of this version"):
        Study.open(tmp_path / "mine")


def test_two_at_once_are_refused(machine: Machine, run: Callable[..., Study], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    holder = [
        sys.executable, "-c",
        "import sys, filelock\nlock = filelock.FileLock(sys.argv[1])\nlock.acquire()\nprint('held', flush=True)\n"
        "sys.stdin.read()",
        str(tmp_path / "out" / ".lock"),
    ]  # fmt: skip
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match="another process is running the study"):
            run()
        other.send_signal(signal.SIGKILL)
    run()
    assert machine.started == ORDER


def test_the_lock_is_given_back(machine: Machine, run: Callable[..., Study], tmp_path: Path) -> None:
    run()
    with filelock.FileLock(tmp_path / "out" / ".lock", timeout=0):
        pass


def test_all_of_a_trial_is_on_the_disk_before_it_has_its_name(
    machine: Machine, run: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    named: dict[str, set[Path]] = {}
    fsync, replace = os.fsync, os.replace

    def noting(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def naming(source: Path, target: Path) -> None:
        if target.parent.name == "trials":
            wanted = {source, *source.rglob("*")}
            assert wanted <= set(synced)
            named[target.name] = {path.relative_to(source) for path in wanted if path != source}
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "replace", naming)
    run()
    assert set(named) == set(ORDER)
    assert {Path("trial.json"), Path("steps.csv")} <= named[ORDER[0]]
    assert synced.count(tmp_path / "out" / "trials") == len(ORDER), "the name itself, too"


@pytest.mark.parametrize("name", [".lock", "study.json", "tables"])
def test_places_that_cannot_be_written_are_named(
    machine: Machine, run: Callable[..., Study], tmp_path: Path, name: str
) -> None:
    run()
    blocked = tmp_path / "out" / name
    shutil.rmtree(blocked) if blocked.is_dir() else blocked.unlink()
    if name == "study.json":
        blocked = blocked.with_name(".study.json.partial")
        (tmp_path / "out" / "trials").rename(tmp_path / "elsewhere")
        shutil.rmtree(tmp_path / "out" / "tables")
        blocked.mkdir()
    elif name == "tables":
        blocked.touch()
    else:
        blocked.mkdir()
    with pytest.raises(UsageError, match=f"cannot write results to {tmp_path / 'out'}: "):
        run()


def test_a_disk_that_is_full(
    machine: Machine, run: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: TrialOutcome, directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrialOutcome, "write", full)
    with pytest.raises(UsageError, match=r"cannot write results to .*No space left"):
        run()
