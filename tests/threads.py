"""Which threads run in a test's process."""

from __future__ import annotations

import threading

from zmq.utils.garbage import GarbageCollectorThread


def running() -> set[threading.Thread]:
    """Without ZeroMQ's own for the whole process, which the first message that is sent without a copy starts."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, GarbageCollectorThread)}
