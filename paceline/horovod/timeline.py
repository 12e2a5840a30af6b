"""When operations were asked for, and when they were done, as a trace that browsers draw (chrome://tracing)."""

import json
import threading
import time
from typing import Any, TextIO, final

from paceline.horovod.requests import Request


@final
class Timeline:
    """Writes events while a file is open. Rank 0 alone has one."""

    def __init__(self) -> None:
        self.is_on = False
        """Whether a file is open."""
        self._file: TextIO | None = None
        self._marks_cycles = False
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._began_ns = 0

    def start(self, path: str, *, marks_cycles: bool) -> None:
        """Write into this file from here on. Raises OSError if it cannot be written."""
        self.stop()
        with self._lock:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # open until stop
            self._marks_cycles, self._rows, self._began_ns = marks_cycles, {}, time.perf_counter_ns()
            self._file.write("[\n")
            self.is_on = True
            since_us = time.time_ns() // 1000  # noqa: TID251 - it is to be the epoch's
            self._write({"name": "start", "ph": "M", "args": {"start_time_since_epoch_in_micros": since_us}}, sep="")

    def stop(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file, self.is_on = None, False

    def asked(self, request: Request) -> None:
        self._event(request, f"NEGOTIATE_{request.kind.upper()}", "B")

    def begins(self, request: Request) -> None:
        """All ranks have asked for it."""
        self._event(request, "", "E")
        self._event(request, request.kind.upper(), "B")

    def done(self, request: Request) -> None:
        self._event(request, "", "E")

    def cycle(self) -> None:
        if self._file is None or not self._marks_cycles:
            return
        with self._lock:
            if self._file is not None:
                self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "ts": self._now_us()})

    def _event(self, request: Request, name: str, phase: str) -> None:
        if self._file is None:
            return
        with self._lock:
            for tensor in request.shown if self._file is not None else ():
                row = self._rows.get(tensor)
                if row is None:
                    row = self._rows[tensor] = len(self._rows) + 1
                    self._write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": tensor}})
                self._write({"name": name, "ph": phase, "ts": self._now_us(), "pid": row})

    def _write(self, event: dict[str, Any], sep: str = ",\n") -> None:
        assert self._file is not None
        self._file.write(sep + json.dumps(event))
        self._file.flush()  # it is looked at while the script runs

    def _now_us(self) -> int:
        return (time.perf_counter_ns() - self._began_ns) // 1000
