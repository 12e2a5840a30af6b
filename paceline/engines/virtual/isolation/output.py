"""What scripts print, by who printed it."""

import io
from collections.abc import Callable
from typing import TextIO, final


@final
class OutputByLine(io.TextIOBase):
    """A stand-in for standard output: `say` gets whole lines of the worker that `who` names. What the launcher itself
    prints (`who` names nobody) goes to `otherwise` as it comes, if there is such an output."""

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

    def retire(self) -> None:
        """Hand on the lines without an end, and forget the run.

        Modules that scripts have imported may have kept this as their standard output.
        """
        for name, rest in self._begun.items():
            if rest:
                self._say(name, rest)
        self._begun.clear()
        self._who, self._say = (lambda: None), (lambda who, line: None)
