"""Messages over gloo, which tells that one is over only to whoever blocks on it: a thread does."""

from __future__ import annotations

import threading
from typing import Any, final

from paceline.comm.arguments import timeout_of


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
        self._is_over.wait(timeout_s)

    def wait(self) -> None:
        self._is_over.wait()
        if self._failure is not None:
            raise self._failure

    def watch(self) -> None:
        """Block until the backend's work is over, and remember how it ended."""
        try:
            self._work.wait(timeout_of(None))  # whoever waits has a deadline; gloo's would close the connection
        except RuntimeError as error:
            self._failure = error
        self._is_over.set()
