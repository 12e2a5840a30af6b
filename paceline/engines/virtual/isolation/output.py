"""What scripts print, by who printed it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TextIO, final


@final
class OutputByLine(io.TextIOBase):
    """A stand-in for standard output that hands on whole lines of workers, and anything else as it comes.

    Args:
        who: the worker that prints just now; none: it is the launcher itself.
        say: gets a worker's name and a line without its end.
        otherwise: where the launcher's own words go; none: nowhere, as in a program without standard output.
    """

    def __init__(
        self, who: Callable[[], str | None], say: Callable[[str, str], None], otherwise: TextIO | None
    ) -> None:
        self._who, self._say, self._otherwise = who, say, otherwise
        self._begun: dict[str, str] = {}

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        who = self._who()
        if who is None:
            return self._otherwise.write(text) if self._otherwise is not None else len(text)
        *lines, rest = (self._begun.get(who, "") + text).split("\n")
        self._begun[who] = rest
        for line in lines:
            self._say(who, line)
        return len(text)

    def flush(self) -> None:
        if self._otherwise is not None:
            self._otherwise.flush()

    def finish(self, who: str | None = None) -> None:
        """Hand on lines without an end, of one worker or of all."""
        for name in [who] if who is not None else list(self._begun):
            if rest := self._begun.pop(name, ""):
                self._say(name, rest)
