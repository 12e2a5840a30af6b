"""Running a user's script or function inside a worker, and telling how it ended."""

from __future__ import annotations

import io
import linecache
import os
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import Aborted, BudgetReached, DeadlineExceeded, PeerLost


@dataclass(frozen=True)
class Script:
    """A script as text, so that every host runs what the launcher read."""

    path: str
    source: str
    arguments: tuple[str, ...]
    working_directory: str


Program = Script | Callable[[], Any]


@dataclass(frozen=True)
class Outcome:
    """How one worker's program ended."""

    error: str | None = None
    """`ErrorType: message`, if it failed."""
    traceback: str = ""
    is_consequence: bool = False
    """The failure only says that someone else failed."""
    kind: str = ""
    """The error's type."""
    step: int = 0


def run_program(program: Program) -> None:
    """Run it to its end; a script's `sys.exit(0)` is an end like any other.

    Raises:
        Whatever the program raises; RuntimeError where it exits with another status.
    """
    try:
        if isinstance(program, Script):
            _run_script(program)
        else:
            program()
    except BudgetReached:
        pass
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise RuntimeError(f"the script ended with sys.exit({exit_.code!r})") from exit_


def outcome_of(error: BaseException, *, step: int) -> Outcome:
    """Describe a failure, with the script's own frames alone in the traceback."""
    is_consequence = isinstance(error, PeerLost | Aborted | DeadlineExceeded)
    frames = traceback.TracebackException.from_exception(error)
    own = os.path.dirname(os.path.abspath(__file__))
    for part in _chain(frames):
        part.stack = traceback.StackSummary.from_list([f for f in part.stack if not f.filename.startswith(own)])
    text = "".join(frames.format())
    return Outcome(f"{type(error).__name__}: {error}", text, is_consequence, type(error).__name__, step)


def _chain(frames: traceback.TracebackException) -> list[traceback.TracebackException]:
    found = [frames]
    for linked in (frames.__cause__, frames.__context__):
        if linked is not None:
            found += _chain(linked)
    return found


def _run_script(script: Script) -> None:
    """As `python script.py arguments` would, in a fresh `__main__`."""
    if os.path.isdir(script.working_directory):
        os.chdir(script.working_directory)
    sys.argv = [script.path, *script.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script.path)))
    main = types.ModuleType("__main__")
    main.__file__ = script.path
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    # Tracebacks show the script's lines on hosts that do not have the file.
    linecache.cache[script.path] = (len(script.source), None, script.source.splitlines(keepends=True), script.path)
    exec(compile(script.source, script.path, "exec", dont_inherit=True), main.__dict__)


class LineWriter(io.TextIOBase):
    """A text stream that hands on whole lines."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._on_line(line)
        return len(text)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._rest:
            self._on_line(self._rest)
            self._rest = ""
