"""A directory for a Ray that is started here, which nobody else can enter, and which does not outlive it."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import UsageError

PLACE = Path("/tmp")  # the paths of sockets must be short
_PREFIX = "paceline-ray-"
RAYS_OWN = "ray"
"""The directory in there that Ray gets, since it lets everybody into the one that it is given."""


@contextmanager
def local_directory() -> Iterator[str]:
    """A place for a local Ray's sockets and logs, which Ray itself would leave behind.

    Locked while in use: those that a killed launcher of the same user left are removed here.
    """
    for left in PLACE.glob(f"{_PREFIX}*"):
        with suppress(OSError), locked(left):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=PLACE))  # a name that nobody clears up, until it is locked
    with locked(made):
        directory = made.rename(made.with_name(made.name.removeprefix(".")))
        try:
            yield str(directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Raises OSError if another process holds it, or it is no directory of this user's."""
    with _opened(directory) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """Raises OSError if it is no directory, or another user's."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{directory} is another user's")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def same_directory(path: Path) -> Iterator[None]:
    """Another host's directory, made here under its path, as Ray wants it; of one that is here already, as where a
    scheduler has several hosts on one machine, whoever made it takes care.

    Raises:
        UsageError: what is here already was put there by somebody else.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        try:
            with _opened(path) as descriptor:
                if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
                    raise PermissionError(f"other users can enter {path}")
        except OSError as error:
            raise UsageError(
                f"{path}, where Ray is to have its files, is there already and is no directory of this user's alone "
                f"({error}): look who has put it there, remove it, and start the job again"
            ) from error
        yield
        return
    with locked(path):
        try:
            yield
        finally:
            shutil.rmtree(path, ignore_errors=True)
