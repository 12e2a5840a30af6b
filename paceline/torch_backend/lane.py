"""The order of a process group's collective operations, and who drives them."""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from paceline.comm.base import Work
from paceline.comm.helper import Helper
from paceline.torch_backend.works import GroupWork

# An asynchronous all-reduce of 12 KB between two ranks takes 85 us so, and 124 us if the thread takes it at once.
# Bounds from 0.5 ms to 10 ms make no difference.
INLINE_S = 2e-3


@final
class Lane:
    """Runs operations one after another, in the order of the calls.

    An operation that the caller waits for runs in the caller's thread. An asynchronous one that never blocks is tried
    there for a moment; then the lane's own thread takes it, so that ranks may use several groups in different orders.

    An operation that a future's callback asks for runs before those asked for meanwhile: the order is then the same on
    every rank, whichever thread runs the callback.
    """

    def __init__(self, name: str, *, inline_s: float) -> None:
        """`inline_s`: how long an asynchronous operation is tried in its caller's thread."""
        self._inline_s = inline_s
        self._queue: deque[GroupWork] = deque()
        self._driving = threading.Lock()
        self._driver: int | None = None  # the thread that holds the lock
        self._helper = Helper(name)

    def submit(self, work: GroupWork, *, is_async: bool, never_blocks: bool) -> None:
        """Append an operation. `never_blocks`: its `start` returns at once, and what it returns can be polled."""
        if self._is_driving():
            self._queue.appendleft(work)
            self._run_first()
            return
        self._queue.append(work)
        if not is_async or self._helper.is_closed:  # a closed group's operations fail as they begin
            self.help(work, None)
            return
        if never_blocks:
            with self._drive(waits=False) as drives:
                if drives and self._queue and self._queue[0] is work:
                    self._run_first(patience_s=self._inline_s)
        if not work.is_over:
            self._helper.call(self._serve)

    def help(self, work: GroupWork, timeout_s: float | None) -> None:
        """Return once `work` is over, or the time is."""
        if self._is_driving():
            self._run_until(work)
        # Driving blocks as long as the collective does: a wait with a timeout leaves it to the lane's thread.
        elif timeout_s is None:
            with self._drive(waits=False) as drives:
                if drives:
                    self._run_until(work)
        if not work.is_over:
            self._helper.call(self._serve)
            work.wait_until_over(timeout_s)

    def close(self) -> None:
        """Join the thread; the collective must have been aborted, so that nothing in it blocks."""
        self._helper.close()

    def _is_driving(self) -> bool:
        return self._driver == threading.get_ident()

    @contextmanager
    def _drive(self, *, waits: bool) -> Iterator[bool]:
        """Make this thread the one that drives, and say whether it is; `waits`: for another that does."""
        if not self._driving.acquire(blocking=waits):
            yield False
            return
        self._driver = threading.get_ident()
        try:
            yield True
        finally:
            self._driver = None
            self._driving.release()

    def _run_until(self, work: GroupWork) -> None:
        while self._queue and not work.is_over:
            self._run_first()

    def _run_first(self, *, patience_s: float | None = None) -> None:
        """Run the first operation to its end; where that takes longer than the patience, it stays the first."""
        work = self._queue.popleft()
        try:
            if work.under_way is None:
                work.under_way = work.start()
            if patience_s is None:
                work.under_way.wait()
            elif not _is_over_within(patience_s, work.under_way):
                self._queue.appendleft(work)
                return
        except BaseException as error:
            work.end(error)
            if not isinstance(error, Exception):
                raise
        else:
            work.end()

    def _serve(self) -> None:
        with self._drive(waits=True):
            while self._queue:
                self._run_first()


def _is_over_within(patience_s: float, work: Work) -> bool:
    until_s = time.perf_counter() + patience_s
    while not work.poll():
        if time.perf_counter() >= until_s:
            return False
        os.sched_yield()
    return True
