"""A run in a thread of its own, whose evaluations are taken one by one while it trains."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from paceline.checkpoint import FILE_NAME
from paceline.checkpoint_files import iteration_of
from paceline.engines.ray.interrupts import Interrupted
from paceline.engines.requests import ask
from paceline.engines.standing import Watcher
from paceline.errors import RunFailed, UsageError
from paceline.records import EvaluationRecord, Record

_LOOK_S = 0.1


@final
class BackgroundRun(Watcher):
    """The run begins at once.

    Args:
        begin: calls `paceline.run` with this directory and the watcher that it is given, and takes checkpoints.
        directory: of the run's results.
    """

    def __init__(self, begin: Callable[..., Any], directory: Path) -> None:
        self._directory = directory
        self._made: queue.SimpleQueue[EvaluationRecord | None] = queue.SimpleQueue()
        self._taken = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._train, args=[begin], daemon=True)
        self._thread.start()

    def on_output(self, who: str, line: str) -> None:
        print(f"[{who}] {line}", flush=True)

    def on_records(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, EvaluationRecord):
                self._made.put(record)

    def next_evaluation(self) -> EvaluationRecord | None:
        """Waits for it; none once the run has ended. Raises what the run has raised."""
        record = self._made.get()
        if record is not None:
            self._taken = record.iteration
            return record
        self._made.put(None)  # for whoever asks again
        if self._failure is not None:
            raise self._failure
        return None

    def checkpoint(self) -> Path:
        """The newest, waited for until it holds what was evaluated last of what has been taken.

        Raises:
            RunFailed: the run has ended without one.
        """
        newest = self._directory / FILE_NAME
        is_under_way = True
        while (saved := iteration_of(newest)) is None or saved < self._taken:
            if not is_under_way:
                raise RunFailed(
                    f"the run in {self._directory} has ended without a checkpoint of iteration {self._taken}"
                ) from self._failure
            is_under_way = self._thread.is_alive()  # looked at once more after the end
            time.sleep(_LOOK_S)
        return newest

    def stop(self) -> None:
        """Have the run save itself and end. All its processes have ended then."""
        while self._thread.is_alive():
            with suppress(UsageError):  # it does not listen yet, or no longer
                ask(self._directory, {"do": "stop"})
            self._thread.join(_LOOK_S)

    def _train(self, begin: Callable[..., Any]) -> None:
        try:
            begin(out=self._directory, watcher=self)
        except Interrupted:
            pass
        except BaseException as failure:
            self._failure = failure
        finally:
            self._made.put(None)
