"""A worker's records on their way to the launcher that has started it."""

import atexit
import threading
from typing import Any, ClassVar, final

from paceline.horovod.line import Line
from paceline.records import Record, Reporter, to_plain

_SEND_WITHIN_S = 0.25


@final
class LineReporter(Reporter):
    """Sends a record within a quarter of a second, together with what has come meanwhile; the rest when the process
    ends, or the launcher has it end."""

    keeps_files: ClassVar[bool] = False

    def __init__(self, line: Line) -> None:
        self._line = line
        self._pending: list[list[Any]] = []
        self._lock = threading.Lock()
        atexit.register(self.send)
        line.before_end = self.send

    def emit(self, record: Record) -> None:
        with self._lock:
            self._pending.append(to_plain(record))
            is_first = len(self._pending) == 1
        if is_first:
            timer = threading.Timer(_SEND_WITHIN_S, self.send)
            timer.daemon = True
            timer.start()

    def save(self, name: str, content: bytes | memoryview) -> None:
        """The script saves by itself."""

    def stop_requested(self) -> bool:
        return False

    def send(self) -> None:
        """Send what has not been sent yet."""
        with self._lock:
            pending, self._pending = self._pending, []
        if pending:
            self._line.say("records", records=pending)


_reporter: LineReporter | None = None


def current() -> LineReporter | None:
    """Where this process's records go, if a launcher wants them."""
    return _reporter


def report_over(line: Line) -> LineReporter:
    """Send this process's records there from here on."""
    global _reporter
    _reporter = LineReporter(line)
    return _reporter
