"""A run's records, written beside what else the launcher does."""

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import final

from paceline.records import Record, RecordWriter

_MOST_ON_THEIR_WAY = 4096
"""Some minutes of a run's messages with records."""


@final
class RecordWriting:
    """One thread that appends to the files of a result directory, so that a slow disk keeps nobody from being heard.
    Records reach the disk as soon as it is done with those before. Where `most` batches of them are on their way,
    whoever has more waits: memory is not to fill up beside a disk that stands still.

    A disk that is full, or a record that cannot be written, is in `error`.
    """

    def __init__(self, directory: Path, *, most: int = _MOST_ON_THEIR_WAY) -> None:
        self._writer = RecordWriter(directory)
        self._jobs: queue.Queue[Sequence[Record] | threading.Event | None] = queue.Queue(most)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="paceline-records", daemon=True)
        self._thread.start()

    def put(self, records: Sequence[Record]) -> None:
        """Have these written after all others so far."""
        self._jobs.put(records)

    def mark(self) -> threading.Event:
        """What is set once all is on the disk that was put so far, or cannot be written."""
        is_done = threading.Event()
        self._jobs.put(is_done)
        return is_done

    def close(self) -> None:
        """Waits until all is written."""
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not isinstance(job, threading.Event):
                    self._writer.write(job)
                if isinstance(job, threading.Event) or self._jobs.empty():
                    self._writer.flush()
            except Exception as error:  # the run's own loop is to hear of it, and others wait for the mark
                self.error = error
            if isinstance(job, threading.Event):
                job.set()
        try:
            self._writer.close()
        except OSError as error:
            self.error = error
