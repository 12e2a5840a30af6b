"""A run's records, written beside what else the launcher does."""

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

from paceline.records import Record, RecordWriter, Row

_MOST_ON_THEIR_WAY = 4096
"""Some minutes of a run's messages with records."""
_LOOK_S = 0.1
"""How often who waits looks whether the disk takes anything."""


@final
class RecordWriting:
    """One thread that appends to the files of a result directory, so that a slow disk keeps nobody from being heard.
    Records reach the disk as soon as it is done with those before. Where `most` batches of them are on their way,
    whoever has more waits: memory is not to fill up beside a disk that stands still.

    A disk that is full is in `error`.
    """

    def __init__(self, directory: Path, *, most: int = _MOST_ON_THEIR_WAY) -> None:
        self._writer = RecordWriter(directory)
        self._jobs: queue.Queue[Sequence[Row] | threading.Event | None] = queue.Queue(most)
        self.error: Exception | None = None
        self._num_taken = 0
        """Batches that the disk has taken, or refused."""
        self._thread = threading.Thread(target=self._serve, name="paceline-records", daemon=True)
        self._thread.start()

    def put(self, records: Sequence[Record]) -> None:
        """Have these written after all others so far. Raises as `RecordWriter.rows`; then those before are written."""
        rows: list[Row] = []
        try:
            rows.extend(self._writer.rows(records))
        finally:
            self._jobs.put(rows)

    def mark(self) -> threading.Event:
        """An event, which is set once all that was put so far is on the disk, or cannot be written."""
        is_done = threading.Event()
        self._jobs.put(is_done)
        return is_done

    def wait(self, *, still_s: float) -> bool:
        """Wait until all is on the disk that was put so far, or the disk has taken nothing for so long. Returns whether
        it is, or cannot be there."""
        num_taken, until_s, is_put, is_done = self._num_taken, time.monotonic() + still_s, False, threading.Event()
        while not is_done.wait(_LOOK_S if is_put else 0.0):
            is_put = is_put or self._has_put(is_done, _LOOK_S)
            if num_taken != self._num_taken:
                num_taken, until_s = self._num_taken, time.monotonic() + still_s
            elif time.monotonic() > until_s:
                return False
        return True

    def close(self, *, limit_s: float) -> bool:
        """All is written first, if that takes no longer. Returns whether it was."""
        until_s = time.monotonic() + limit_s
        if self._has_put(None, limit_s):
            self._thread.join(max(0.0, until_s - time.monotonic()))
        return not self._thread.is_alive()

    def _has_put(self, job: threading.Event | None, limit_s: float) -> bool:
        """Whether there was room for it within that time."""
        try:
            self._jobs.put(job, timeout=limit_s)
        except queue.Full:
            return False
        return True

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not isinstance(job, threading.Event):
                    self._writer.append(job)
                if isinstance(job, threading.Event) or self._jobs.empty():
                    self._writer.flush()
            except Exception as error:  # the run's own loop is to hear of it, and others wait for the mark
                self.error = error
            self._num_taken += 1
            if isinstance(job, threading.Event):
                job.set()
        try:
            self._writer.close()
        except OSError as error:
            self.error = error
