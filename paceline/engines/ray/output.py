"""What a process and its children print, line by line."""

import contextlib
import fcntl
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator

_PIPE_BYTES = 1 << 20
_LOOK_INTERVAL_MS = 50
_LAST_LINES_S = 1.0  # how long a child that goes on printing after the script's end is listened to


@contextlib.contextmanager
def captured(say: Callable[[str], None]) -> Iterator[None]:
    """Hand on every line that goes to standard output or error: of this process, of its C libraries, of its children.

    Args:
        say: gets each line without its end; called in another thread.
    """
    reading, writing = os.pipe()
    # Room for what a C library prints while it keeps the reading thread from running.
    with contextlib.suppress(OSError):
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    before = [os.dup(1), os.dup(2)]
    is_over = threading.Event()
    reader = threading.Thread(target=_read, args=(reading, say, is_over), name="paceline-output", daemon=True)
    for number in (1, 2):
        os.dup2(writing, number)
    os.close(writing)
    reader.start()
    try:
        with _text(1) as out, _text(2) as err, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    finally:
        for number, descriptor in enumerate(before, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        is_over.set()
        reader.join()
        os.close(reading)


def _text(descriptor: int) -> io.TextIOWrapper:
    """A stream of its own, so that nothing stays in the buffer of the one that was there before."""
    sys.stdout.flush()
    sys.stderr.flush()
    raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115 - closed with the text stream
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _read(descriptor: int, say: Callable[[str], None], is_over: threading.Event) -> None:
    rest = b""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    # Children that outlive the script may keep the pipe open: its end is not the sign.
    until_s: float | None = None
    while (has_more := bool(poll.poll(_LOOK_INTERVAL_MS))) or not is_over.is_set():
        if is_over.is_set():
            until_s = until_s or time.monotonic() + _LAST_LINES_S
            if time.monotonic() > until_s:
                break
        if not has_more:
            continue
        chunk = os.read(descriptor, _PIPE_BYTES)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            say(_readable(line))
    if rest:
        say(_readable(rest))


def _readable(line: bytes) -> str:
    """The text of a line. If it was written over again and again, as progress bars do, that is its last state."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
