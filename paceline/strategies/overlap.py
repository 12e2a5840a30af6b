"""How much of an exchange is hidden behind backward."""

import time
from collections.abc import Callable
from typing import final

from paceline.comm.base import Timing


@final
class Overlap:
    """Measures the time in which buckets were under way while this worker went on with its backward pass.

    What the worker itself spends on the exchange meanwhile, moving or reducing data, is communication and not hidden.
    """

    def __init__(self, spent: Timing, *, now_s: Callable[[], float] = time.perf_counter) -> None:
        """`spent`: the running totals of the exchange that is measured, with the clock `now_s`."""
        self.timing = Timing()
        self._now_s = now_s
        self._spent = spent
        self.is_under_way = False
        self._since_s = self._spent_before_s = 0.0

    def begin(self) -> None:
        """A bucket is under way; with others under way already, nothing new."""
        if not self.is_under_way:
            self.is_under_way, self._since_s = True, self._now_s()
            self._spent_before_s = self._spent_s()

    def end(self) -> None:
        """No bucket is under way any more, or backward has ended and what is left is waited for."""
        if self.is_under_way:
            self.is_under_way = False
            spent_s = self._spent_s() - self._spent_before_s
            self.timing.hidden_s += max(0.0, self._now_s() - self._since_s - spent_s)

    def _spent_s(self) -> float:
        return self._spent.communication_s + self._spent.waiting_s
