"""Work that is done beside training, in a thread."""

import threading
from collections.abc import Callable
from typing import final


@final
class Beside:
    """Does one thing at a time. Whoever brings the next waits for the one under way. So at most one copy of a run's
    state is held, files appear in the order in which they were asked for, and none is left out."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Begin to do it, once what is under way is done. Raises what that has raised."""
        self.wait()
        self._thread = threading.Thread(target=self._do, args=(work,), name="paceline-beside", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is under way. Raises what the work has raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as failure:
            self._failure = failure
