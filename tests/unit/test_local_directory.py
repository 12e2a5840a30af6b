"""Where a local Ray keeps its files: nobody else's things under /tmp are opened, followed or removed."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.engines.ray import local_directory
from paceline.errors import UsageError

NOBODY = 65534


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(local_directory, "PLACE", tmp_path)
    return tmp_path


def test_a_directory_is_the_users_alone_and_goes_at_the_end(place: Path) -> None:
    with local_directory.local_directory() as directory:
        found = os.stat(directory)
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o700)
        assert [entry.name for entry in place.iterdir()] == [Path(directory).name]
        (Path(directory) / "socket").touch()
    assert list(place.iterdir()) == []


def test_what_a_killed_launcher_left_is_removed_and_what_is_in_use_is_not(place: Path) -> None:
    left, used = place / "paceline-ray-left", place / "paceline-ray-used"
    for path in (left, used):
        (path / "session").mkdir(parents=True)
    descriptor = os.open(used, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with local_directory.local_directory():
        assert not left.exists()
        assert (used / "session").exists()
    os.close(descriptor)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_file(path: Path) -> None:
    path.write_text("mine")


def make_link(path: Path) -> None:
    target = path.parent / "elsewhere"
    (target / "precious").mkdir(parents=True)
    path.symlink_to(target)


def make_link_inside(path: Path) -> None:
    """What the directory's links lead to stays, though the directory goes."""
    target = path.parent / "elsewhere"
    (target / "precious").mkdir(parents=True)
    path.mkdir()
    (path / "link").symlink_to(target)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [make_fifo, make_file, make_link, make_link_inside])
def test_what_looks_like_a_directory_and_is_none(place: Path, make: Callable[[Path], None]) -> None:
    """To open a FIFO as it comes would wait for ever; to follow a link would clear up elsewhere."""
    planted = place / "paceline-ray-planted"
    make(planted)
    with local_directory.local_directory() as directory:
        assert Path(directory).is_dir()
    assert os.path.lexists(planted) == (make is not make_link_inside)
    assert make not in (make_link, make_link_inside) or (place / "elsewhere" / "precious").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_left_alone(place: Path) -> None:
    theirs = place / "paceline-ray-theirs"
    (theirs / "session").mkdir(parents=True)
    os.chown(theirs, NOBODY, NOBODY)
    with local_directory.local_directory():
        pass
    assert (theirs / "session").is_dir()


def make_open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def make_theirs(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)


def make_link_to_own(path: Path) -> None:
    (path.parent / "own").mkdir(mode=0o700)
    path.symlink_to(path.parent / "own")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [make_fifo, make_file, make_link, make_link_to_own, make_open_to_all, make_theirs])
def test_what_somebody_has_put_in_the_place_of_another_hosts_directory_is_refused(
    place: Path, make: Callable[[Path], None]
) -> None:
    """Its name is on the first host's command lines, where other users read it."""
    if make is make_theirs and os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    planted = place / "paceline-ray-planted"
    make(planted)
    with (
        pytest.raises(UsageError, match=r"paceline-ray-planted, where Ray is to have its files, .*remove it"),
        local_directory.same_directory(planted),
    ):
        pytest.fail("it was used")
    assert os.path.lexists(planted)


def test_launchers_that_start_at_once_do_not_remove_each_others(place: Path) -> None:
    num_lost = []

    def start_and_end() -> None:
        for _ in range(50):
            with local_directory.local_directory() as directory:
                num_lost.append(not Path(directory).is_dir())

    threads = [threading.Thread(target=start_and_end) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(num_lost), sum(num_lost)) == (200, 0)
    assert list(place.iterdir()) == []


def test_another_hosts_directory_is_made_locked_and_removed_unless_it_is_there(place: Path) -> None:
    with local_directory.local_directory() as first:
        with local_directory.same_directory(Path(first)):
            assert Path(first).exists()
        assert Path(first).exists()
    elsewhere = Path(first)
    with local_directory.same_directory(elsewhere):
        assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o700
        with local_directory.local_directory():
            assert elsewhere.exists()
    assert not elsewhere.exists()
