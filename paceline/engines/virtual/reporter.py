"""Records and files of a virtual run, straight to the result directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from paceline.engines.progress import Progress
from paceline.errors import RunFailed
from paceline.records import EventRecord, Record, RecordWriter, Reporter


@final
class DirectoryReporter(Reporter):
    """One for all workers and servers.

    Args:
        directory: of the results.
        on_record: gets every record once it is written, and the progress that follows from it.
    """

    def __init__(self, directory: Path, on_record: Callable[[Record, Progress], None]) -> None:
        self._directory, self._on_record = directory, on_record
        self._writer = RecordWriter(directory)
        self._is_stopping = False
        self.progress = Progress()

    def emit(self, record: Record) -> None:
        self._guarded(record)
        self.progress.take((record,))
        self._on_record(record, self.progress)

    def event(self, name: str, **details: Any) -> None:
        """Write down that something happened, at the run's present iteration."""
        self.emit(EventRecord(name, "run", self.progress.iteration, self.progress.time_s, details))

    def save(self, name: str, content: bytes | memoryview) -> None:
        target = self._directory / name
        partial = target.with_suffix(target.suffix + ".partial")
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise RunFailed(f"cannot write {name}: {error.strerror} in {self._directory.resolve()}") from None

    def stop_requested(self) -> bool:
        return self._is_stopping

    def request_stop(self) -> None:
        self._is_stopping = True

    def close(self) -> None:
        self._writer.close()

    def _guarded(self, record: Record) -> None:
        try:
            self._writer.write((record,))
        except OSError as error:
            raise RunFailed(f"cannot write records: {error.strerror} in {self._directory.resolve()}") from None
