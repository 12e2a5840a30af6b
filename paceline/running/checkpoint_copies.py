"""Copies of a run's checkpoints at an address of fsspec's, for a disk that goes with its machine."""

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final
from urllib.parse import urlsplit

import fsspec

from paceline import durable, sealing
from paceline.checkpoint import FILE_NAME, Checkpoint, DamagedCheckpoint
from paceline.errors import RunFailed, UsageError
from paceline.running import manifest
from paceline.running.resuming import BEST, NEWEST, Found, as_iteration

_LOOK_S = 0.5
_SAY_S = 2.0
_END_S = 600.0
_UNDER_WAY = ".checkpoint-copied.pt"
_PIECE_BYTES = 2**22


def is_address(text: str | Path) -> bool:
    """Whether it names a place of fsspec's, and no directory."""
    return "://" in str(text)


def find(address: str, which: str | int = NEWEST) -> Found:
    """The copy to go on from; where the newest is damaged, the one before.

    Args:
        which: `newest`, or an iteration.

    Raises:
        UsageError: there is none, or the address cannot be read.
    """
    if which == BEST:
        raise UsageError(f"{address} has copies of the newest checkpoints, not of the best; leave --from out")
    place = _Place.at(address)
    there = place.iterations()
    wanted = there if which == NEWEST else [number for number in there if number == as_iteration(which)]
    if not wanted:
        has = "no checkpoint" if which == NEWEST else f"no checkpoint of iteration {which}"
        raise UsageError(f"{address} has {has}; there are {', '.join(map(str, sorted(there))) or 'none'}")
    warnings: list[str] = []
    for iteration in wanted:
        raw, where = place.read(_name(iteration)), f"{address}/{_name(iteration)}"
        try:
            checkpoint = Checkpoint.decode(raw, where=where)
        except DamagedCheckpoint as error:
            warnings.append(str(error))
            continue
        taken = f"; the run goes on from {where}"
        return Found(where, raw, checkpoint, tuple(f"{warning}{taken}" for warning in warnings))
    raise DamagedCheckpoint(warnings[0])


def address_of(run: str | Path) -> str | None:
    """Where a run's copies are: it is given by their address, or by its result directory, whose run may have none."""
    if is_address(run):
        return str(run)
    with contextlib.suppress(UsageError):
        return cast(str | None, manifest.read(Path(run)).get("config", {}).get("copy_checkpoints"))
    return None


@final
class CheckpointCopies:
    """Copies the newest checkpoint of a result directory whenever it is another one, in a thread beside the run.

    An address has the copies of one run: `checkpoint-ITERATION.pt`, of which it keeps as many as the directory, and the
    run's manifest. The thread looks at the directory alone, so that engines need not know of it.
    """

    def __init__(self, address: str, directory: Path, *, keep: int) -> None:
        self._place, self._directory, self._keep = _Place.at(address), directory, keep
        self._newest = directory / FILE_NAME
        self._seen: tuple[int, int] | None = None
        self._failure: str | None = None
        self._is_over = threading.Event()

    def claim(self, described: dict[str, Any], *, is_own: bool, iteration: int) -> None:
        """Have the address for this run, which begins at this iteration.

        Args:
            described: what the manifest says.
            is_own: the run goes on with the one whose copies are there.

        Raises:
            UsageError: the address cannot be written, or has another run's.
        """
        there = self._place.iterations()
        if there and not is_own:
            address = self._place.address
            raise UsageError(f"{address} has another run's checkpoints; give an empty one, or --resume {address}")
        for later in (number for number in there if number > iteration):
            self._place.remove(_name(later))
        self._place.make()
        self._place.write(manifest.FILE_NAME, json.dumps(described, indent=2).encode())

    @contextlib.contextmanager
    def kept(self, say: Callable[[str], None]) -> Iterator[None]:
        """Meanwhile what becomes the newest is copied; in the end the last one is waited for. What cannot be copied is
        said, and the run goes on.

        Raises:
            RunFailed: the last one could not be copied, though the run has ended well.
        """
        self._seen = self._known()  # an earlier run's, which this one may be about to drop
        # Nobody waits for the thread at the end of the process: a network that hangs keeps no run from ending.
        thread = threading.Thread(target=self._serve, args=[say], name="paceline-copies", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self._end(thread, say)
            raise
        self._end(thread, say)
        failure = self._failure or (f"it took more than {_END_S:g} s" if thread.is_alive() else None)
        if failure is not None:
            where = f"in {self._directory}, and not at {self._place.address}"
            raise RunFailed(f"the run has ended well, but its last checkpoint is {where}: {failure}")

    def _end(self, thread: threading.Thread, say: Callable[[str], None]) -> None:
        """Have the last one copied."""
        self._is_over.set()
        thread.join(_SAY_S)
        if thread.is_alive():
            say(f"copying the last checkpoint to {self._place.address}")
            thread.join(_END_S)

    def _serve(self, say: Callable[[str], None]) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._look(say)
        if self._failure is not None:
            self._seen = None  # once more
        self._look(say)

    def _look(self, say: Callable[[str], None]) -> None:
        known = self._known()
        if known is None or known == self._seen:
            return
        self._seen = known
        copied = self._directory / _UNDER_WAY
        try:
            durable.also(self._newest, copied)  # the run may have a newer one at any time
            self._copy(copied)
            self._failure = None
        except Exception as error:  # each file system has errors of its own
            self._failure = f"{type(error).__name__}: {error}"
            say(f"a checkpoint is not copied to {self._place.address}: {self._failure}")
        finally:
            copied.unlink(missing_ok=True)

    def _known(self) -> tuple[int, int] | None:
        """What tells the newest checkpoint from others, if there is one."""
        try:
            found = self._newest.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _copy(self, source: Path) -> None:
        facts = sealing.facts_of(source)
        if facts.get("rows"):
            raise UsageError("it names files of rows, which servers have written and which are not copied")
        self._place.put(source, _name(facts["iteration"]))
        for surplus in self._place.iterations()[self._keep :]:
            self._place.remove(_name(surplus))


def _name(iteration: int) -> str:
    return f"checkpoint-{iteration}.pt"


@final
@dataclass(frozen=True)
class _Place:
    """A directory of any file system that fsspec knows."""

    address: str
    files: Any
    root: str

    @classmethod
    def at(cls, address: str) -> "_Place":
        """Raises UsageError if there is no such file system, what it needs is not installed, or the address has a
        password, which manifests and messages would show."""
        if urlsplit(address).password is not None:
            raise UsageError("leave the password out of the address, which is shown; fsspec's settings may have it")
        try:
            files, root = fsspec.core.url_to_fs(address)
        except Exception as error:  # each file system has errors of its own
            raise UsageError(f"cannot reach {address}: {error}") from None
        return cls(address.rstrip("/"), files, root.rstrip("/"))

    def iterations(self) -> list[int]:
        """Of the checkpoints that are there, from the newest to the oldest; none where there is no directory."""
        with self._said("read"):
            self.files.invalidate_cache()
            if not self.files.exists(self.root):
                return []
            names = [Path(path).name for path in self.files.ls(self.root, detail=False)]
        numbers = (name.removeprefix("checkpoint-").removesuffix(".pt") for name in names)
        return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)

    def read(self, name: str) -> bytes:
        with self._said("read"):
            return cast(bytes, self.files.cat_file(f"{self.root}/{name}"))

    def make(self) -> None:
        with self._said("write to"):
            self.files.makedirs(self.root, exist_ok=True)

    def write(self, name: str, content: bytes) -> None:
        with self._said("write to"):
            self.files.pipe_file(f"{self.root}/{name}", content)

    def put(self, source: Path, name: str) -> None:
        """A copy that is cut off is noticed when it is read, by its digest."""
        with source.open("rb") as file, self.files.open(f"{self.root}/{name}", "wb") as target:
            shutil.copyfileobj(file, target, _PIECE_BYTES)

    def remove(self, name: str) -> None:
        with self._said("write to"):
            self.files.rm_file(f"{self.root}/{name}")

    @contextlib.contextmanager
    def _said(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each file system has errors of its own
            raise UsageError(f"cannot {what} {self.address}: {type(error).__name__}: {error}") from None
