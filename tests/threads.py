"""Which threads run in a test's process."""

from __future__ import annotations

import threading
import time

from zmq.utils.garbage import GarbageCollectorThread

WITHIN_S = 60.0


def running() -> set[threading.Thread]:
    """Without ZeroMQ's own for the whole process, which the first message that is sent without a copy starts."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, GarbageCollectorThread)}


def started_since(before: set[threading.Thread]) -> set[threading.Thread]:
    """Those that run and did not then, once there are none, or a busy machine has had the time to end them."""
    until_s = time.monotonic() + WITHIN_S
    while (found := running() - before) and time.monotonic() < until_s:
        time.sleep(0.01)
    return found
