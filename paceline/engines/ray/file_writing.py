"""Members' files, written beside what else the launcher does."""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import final

from paceline import durable
from paceline.checkpoint import FILE_NAME
from paceline.checkpoint_files import CheckpointFiles
from paceline.messages import Raw, raw_bytes

_MODELS = frozenset({"model.safetensors", "rows.safetensors"})


@final
class FileWriting:
    """One thread that writes, so that a slow disk keeps nobody from noticing that a member has died. Readable like a
    file (`fileno`) once something was written."""

    def __init__(self, directory: Path, checkpoints: CheckpointFiles) -> None:
        self._directory, self._checkpoints = directory, checkpoints
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._written: deque[tuple[str, str | None]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._has_ended = threading.Event()
        # Nobody waits for it at the end of the process: a disk that hangs keeps no run from ending.
        threading.Thread(target=self._serve, name="paceline-files", daemon=True).start()

    def fileno(self) -> int:
        return self._bell

    def begin(self, identity: str, name: str, payload: Sequence[Raw], *, after: threading.Event) -> None:
        """Write a file that this member has sent, once that is set."""
        self._jobs.put(after.wait)
        self._jobs.put(partial(self._write, identity, name, payload))

    def take_written(self) -> list[tuple[str, str | None]]:
        """Members whose files were written since the last call, with the reason if one was not."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return []
        return [self._written.popleft() for _ in range(len(self._written))]

    def wait(self, *, limit_s: float) -> bool:
        """Wait until all is written that was begun, or so long. Returns whether it is."""
        is_done = threading.Event()
        self._jobs.put(is_done.set)
        return is_done.wait(limit_s)

    def close(self, *, limit_s: float) -> bool:
        """What is under way is written first, if that takes no longer. Returns whether it was."""
        self._jobs.put(None)
        is_done = self._has_ended.wait(limit_s)
        if is_done:
            os.close(self._bell)
        return is_done

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._has_ended.set()

    def _write(self, identity: str, name: str, payload: Sequence[Raw]) -> None:
        """Whole or not at all: a full disk leaves the file that was there before. A member writes nothing outside the
        result directory, since it may name these files alone."""
        error: str | None = None
        try:
            if name == FILE_NAME:
                self._checkpoints.write(map(raw_bytes, payload))
            elif name in _MODELS:
                with durable.whole(self._directory / name) as partial, partial.open("wb") as file:
                    file.writelines(map(raw_bytes, payload))
            else:
                error = f"refused to write {name!r}"
        except OSError as failure:
            error = reason(failure, self._directory)
        except Exception as failure:  # whoever waits for the file must hear of it
            error = f"{type(failure).__name__}: {failure}"
        self._written.append((identity, error))
        os.eventfd_write(self._bell, 1)


def reason(error: OSError, directory: Path) -> str:
    return f"{error.strerror} in {directory.resolve()}; what was there before is intact"
