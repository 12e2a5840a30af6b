"""Daemon threads that the interpreter waits for a moment before it ends.

It ends such threads where they are. One that is in gloo's C++ then may abort the process: "terminate called without an
active exception".
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable

_AT_MOST_S = 2.0
_started: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def start_thread(target: Callable[[], object], *, name: str) -> threading.Thread:
    """One that is waited for at exit, all of them together for two seconds at most."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


@atexit.register
def _wait() -> None:
    until_s = time.monotonic() + _AT_MOST_S
    for thread in list(_started):
        thread.join(max(0.0, until_s - time.monotonic()))
