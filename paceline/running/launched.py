"""The results of a job whose processes its launcher starts and hears by itself, such as Horovod's over ssh."""

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self, final

from paceline.config import RunConfig
from paceline.engines.requests import Desk
from paceline.engines.standing import Progress
from paceline.errors import UsageError
from paceline.records import EventRecord, Record, RecordWriter, StepRecord, from_plain
from paceline.running import launch, manifest
from paceline.running.result import Result
from paceline.strategies.base import Strategy

_LOOK_S = 0.1


@final
class LaunchedRun:
    """A result directory, which is made once there is something to record. Within its context the job runs, and others
    on this host see that; its end records how the job has ended.

    Args:
        program: what the manifest calls it.
    """

    def __init__(self, program: str, arguments: Sequence[str], *, strategy: Strategy, num_workers: int) -> None:
        self._directory = launch.new_directory(strategy, workers=num_workers)
        self._described = manifest.describe_run(
            program=program, arguments=arguments, strategy=strategy, num_workers=num_workers, config=RunConfig()
        )
        self._writer: RecordWriter | None = None
        self._noted: list[EventRecord] = []  # before there was a directory
        self._progress = Progress()
        self._attending: threading.Thread | None = None
        self._is_over = threading.Event()
        self._cannot_write = False
        self._lock = threading.Lock()

    def keep(self, worker: int, said: Sequence[list[Any]]) -> None:
        """Write a worker's records, from any thread. A job goes on without where they cannot be written."""
        records = [from_plain(each) for each in said]
        for record in records:
            if isinstance(record, StepRecord):
                record.worker = worker
        with self._lock:
            self._keep(records)

    def note(self, event: EventRecord) -> None:
        """Write what the launcher itself has seen, from any thread: once workers have recorded anything."""
        with self._lock:
            if self._writer is None:
                self._noted.append(event)
            else:
                self._keep([event])

    def _keep(self, records: Sequence[Record]) -> None:
        if self._cannot_write:
            return
        try:
            if self._writer is None:
                self._directory.mkdir(parents=True)
                manifest.write(self._directory, self._described)
                self._writer = RecordWriter(self._directory)
                self._attending = threading.Thread(target=self._attend, args=(Desk(self._directory, self._answer),))
                self._attending.start()
                records = [*self._noted, *records]
            self._progress.take(records)
            self._writer.write(records)
            self._writer.flush()
        except OSError as error:
            self._cannot_write = True
            print(f"steps are not recorded: {error.strerror} in {self._directory.resolve()}", file=sys.stderr)

    @property
    def result(self) -> Result | None:
        """What was recorded, if anything was."""
        return None if self._writer is None else Result(self._directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        name = "ended" if error is None else "failed" if isinstance(error, Exception) else "interrupted"
        details = {"error": str(error)} if name == "failed" else {}
        if self._writer is not None:
            end = EventRecord(name, "run", self._progress.iteration, self._progress.time_s, details)
            self.note(end)
            self._writer.close()
        self._is_over.set()
        if self._attending is not None:
            self._attending.join()

    def _attend(self, desk: Desk) -> None:
        while not self._is_over.wait(_LOOK_S):
            desk.turn()
        desk.close()

    def _answer(self, request: Mapping[str, Any]) -> str:
        """What is said to a command from another terminal."""
        if request.get("do") == "progress":
            return self._progress.to_json()
        raise UsageError(
            "this job is ended by Ctrl-C in its launcher's terminal, and has as many workers as its hosts say"
        )
