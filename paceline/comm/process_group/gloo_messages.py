"""Messages over gloo, which tells that one is over only to whoever blocks on it: a thread does."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import Any, final

# Whoever waits for a message has a deadline of its own; gloo's would close the connection.
_FOR_EVER = timedelta(days=365)


@final
class MessageWay:
    """The messages that this rank sends to one other, or receives from it: over in the order of the calls.

    One thread for all of them: threads of their own take longer to start than a small message takes, and torch keeps
    some bytes of each that has ever waited.
    """

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[WatchedMessage | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, work: Any) -> WatchedMessage:
        """`work`: the backend's, of the next message on this way."""
        message = WatchedMessage(work)
        self._messages.put(message)
        return message

    def close(self) -> None:
        """Have the thread end once all messages are over."""
        self._messages.put(None)

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            message.watch()
            del message  # and with it the tensor, before the next one comes


@final
class WatchedMessage:
    """A message's work that can be asked whether it is over."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._failure: RuntimeError | None = None
        self._is_over = threading.Event()

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def sleep(self, timeout_s: float) -> None:
        """Until it is over, but no longer than that."""
        self._is_over.wait(timeout_s)

    def wait(self) -> None:
        self._is_over.wait()
        if self._failure is not None:
            raise self._failure

    def watch(self) -> None:
        """Block until the backend's work is over, and remember how it ended."""
        try:
            self._work.wait(_FOR_EVER)
        except RuntimeError as error:
            self._failure = error
        self._is_over.set()
