"""Writes the records and files of a run to its result directory, from the process that makes them."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from paceline import durable
from paceline.checkpoint import FILE_NAME
from paceline.checkpoint_files import CheckpointFiles
from paceline.config import RunConfig
from paceline.engines.standing import Progress
from paceline.errors import NotWritten, RunFailed
from paceline.records import EvaluationRecord, EventRecord, Record, RecordWriter, Reporter

FLUSH_INTERVAL_S = 0.05
"""Real time between writes. A record written by itself, right after a gradient, takes 30 to 50 us."""


@final
class DirectoryReporter(Reporter):
    """One for all workers and servers. `config` says which checkpoints are kept; `on_records` gets what was written,
    often several records together, and the progress."""

    def __init__(
        self, directory: Path, config: RunConfig, on_records: Callable[[Sequence[Record], Progress], None]
    ) -> None:
        self._directory, self._on_records = directory, on_records
        self._checkpoints = CheckpointFiles(directory, keep=config.keep_checkpoints, best=config.keep_best)
        self._writer = RecordWriter(directory)
        self._is_stopping = False
        self._pending: list[Record] = []
        self._flushed_s = -FLUSH_INTERVAL_S
        self._progress = Progress()

    @property
    def progress(self) -> Progress:
        """The progress after all records so far."""
        self._flush()
        return self._progress

    def emit(self, record: Record) -> None:
        self._pending.append(record)
        is_rare = isinstance(record, EventRecord | EvaluationRecord)
        if is_rare or time.perf_counter() - self._flushed_s >= FLUSH_INTERVAL_S:
            self._flush()

    def event(self, name: str, who: str = "run", **details: Any) -> None:
        """Record that something happened at the run's present iteration."""
        self.emit(EventRecord(name, who, self.progress.iteration, self.progress.time_s, details))

    def save(self, name: str, content: bytes | memoryview) -> None:
        self._flush()
        self._writer.flush()  # what was recorded before a checkpoint is there when the checkpoint is
        try:
            if name == FILE_NAME:
                self._checkpoints.write([content])
            else:
                with durable.whole(self._directory / name) as partial:
                    partial.write_bytes(content)
        except OSError as error:
            raise NotWritten(f"cannot write {name}: {error.strerror} in {self._directory.resolve()}") from None

    def stop_requested(self) -> bool:
        return self._is_stopping

    def request_stop(self) -> None:
        self._is_stopping = True

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._writer.close()

    def _flush(self) -> None:
        records, self._pending = self._pending, []
        if not records:
            return
        try:
            self._writer.write(records)
        except OSError as error:
            raise RunFailed(f"cannot write records: {error.strerror} in {self._directory.resolve()}") from None
        self._progress.take(records)
        self._on_records(records, self._progress)
        self._flushed_s = time.perf_counter()
