"""A worker's records on their way to the launcher that has started it."""

import atexit
import time
from typing import Any, ClassVar, final

from paceline.horovod.line import PipeLine
from paceline.records import Record, Reporter, to_plain

_SEND_EVERY_S = 0.25


@final
class LineReporter(Reporter):
    """Sends what has come together every quarter of a second, and the rest when the process ends."""

    keeps_files: ClassVar[bool] = False

    def __init__(self, line: PipeLine) -> None:
        self._line = line
        self._pending: list[list[Any]] = []
        self._sent_s = 0.0
        atexit.register(self._send)

    def emit(self, record: Record) -> None:
        self._pending.append(to_plain(record))
        if time.monotonic() - self._sent_s >= _SEND_EVERY_S:
            self._send()

    def save(self, name: str, content: bytes | memoryview) -> None:
        """The script saves by itself."""

    def stop_requested(self) -> bool:
        return False

    def _send(self) -> None:
        pending, self._pending, self._sent_s = self._pending, [], time.monotonic()
        if pending:
            self._line.say("records", records=pending)


_reporter: LineReporter | None = None


def current() -> LineReporter | None:
    """Where this process's records go, if a launcher wants them."""
    return _reporter


def report_over(line: PipeLine) -> None:
    """Send this process's records there from here on."""
    global _reporter
    _reporter = LineReporter(line)
