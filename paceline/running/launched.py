"""The results of a job whose processes its launcher starts and hears by itself, such as Horovod's over ssh."""

import sys
import threading
from collections.abc import Sequence
from typing import Any, final

from paceline.config import RunConfig
from paceline.records import RecordWriter, StepRecord, from_plain
from paceline.running import launch, manifest
from paceline.running.result import Result
from paceline.strategies.base import Strategy


@final
class LaunchedRun:
    """A result directory, which is made once there is something to record.

    Args:
        program: what the manifest calls it.
    """

    def __init__(self, program: str, arguments: Sequence[str], *, strategy: Strategy, num_workers: int) -> None:
        self._directory = launch.new_directory(strategy, workers=num_workers)
        self._described = manifest.describe_run(
            program=program, arguments=arguments, strategy=strategy, num_workers=num_workers, config=RunConfig()
        )
        self._writer: RecordWriter | None = None
        self._cannot_write = False
        self._lock = threading.Lock()

    def keep(self, worker: int, said: Sequence[list[Any]]) -> None:
        """Write a worker's records, from any thread. A job goes on without where they cannot be written."""
        records = [from_plain(each) for each in said]
        for record in records:
            if isinstance(record, StepRecord):
                record.worker = worker
        with self._lock:
            if self._cannot_write:
                return
            try:
                if self._writer is None:
                    self._directory.mkdir(parents=True)
                    manifest.write(self._directory, self._described)
                    self._writer = RecordWriter(self._directory)
                self._writer.write(records)
                self._writer.flush()
            except OSError as error:
                self._cannot_write = True
                print(f"steps are not recorded: {error.strerror} in {self._directory.resolve()}", file=sys.stderr)

    def close(self) -> Result | None:
        """What was recorded, if anything was."""
        with self._lock:
            if self._writer is None:
                return None
            self._writer.close()
        return Result(self._directory)
