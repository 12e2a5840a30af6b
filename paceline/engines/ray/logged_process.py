"""A process that is started here, and what it says."""

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

_STOP_S = 10.0
_WORDS = 1500
"""The end of what a process wrote, in an error."""


@final
class LoggedProcess:
    """One with a file that has its words, in a session of its own: Ctrl-C is for who started it, and ends it."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def words(self) -> str:
        return self._log.read_text(errors="replace")[-_WORDS:].strip() or "it said nothing"

    def stop(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._process.kill()
        self._process.wait()
