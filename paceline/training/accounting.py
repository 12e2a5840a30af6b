"""What of a worker's time was computing, moving tensors, and waiting for others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

from paceline.comm.base import Timing
from paceline.records import StepRecord
from paceline.training.clock import TrainingClock

_Totals = tuple[float, float, int, float]
"""Communication, waiting, bytes moved and hidden time of all timings together. A plain tuple, as every step makes one:
right after training, when this code is in no cache, dataclasses take 10 us more."""


@final
class Account:
    """Divides the training clock among steps. What a pause takes, or moves, belongs to none.

    Args:
        clock: stands until `start`.
        timings: the running totals of this worker's exchange.
    """

    def __init__(self, clock: TrainingClock, timings: Sequence[Timing]) -> None:
        self._clock, self._timings = clock, tuple(timings)
        self._time_s = 0.0
        self._booked: _Totals = (0.0, 0.0, 0, 0.0)

    def start(self) -> None:
        """The first step begins."""
        self._booked = self._totals()
        self._time_s = self._clock.now_s
        self._clock.resume()

    def close_step(self, worker: int, step: int, iteration: int, samples: int, staleness: int) -> StepRecord:
        """The step ends now, and the next one begins."""
        now_s = self._clock.now_s
        if not self._timings:
            compute_s, self._time_s = max(0.0, now_s - self._time_s), now_s
            return StepRecord(worker, step, iteration, now_s, samples, compute_s, 0.0, 0.0, 0, staleness, 0.0)
        totals = self._totals()
        communication_s, waiting_s, moved_bytes, hidden_s = totals
        communication_0_s, waiting_0_s, moved_0_bytes, hidden_0_s = self._booked
        # What is read while others add to it, or rounded, may be less than before.
        communication_s = max(0.0, communication_s - communication_0_s)
        waiting_s = max(0.0, waiting_s - waiting_0_s)
        compute_s = max(0.0, now_s - self._time_s - communication_s - waiting_s)
        moved_bytes, hidden_s = moved_bytes - moved_0_bytes, hidden_s - hidden_0_s
        self._time_s, self._booked = now_s, totals
        where = worker, step, iteration, now_s, samples
        return StepRecord(*where, compute_s, communication_s, waiting_s, moved_bytes, staleness, hidden_s)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The clock stands; the step that was under way goes on afterwards."""
        self._clock.pause()
        before = self._totals()
        try:
            yield
        finally:
            after = self._totals()
            communication_s, waiting_s, moved_bytes, hidden_s = self._booked
            self._booked = (
                communication_s + after[0] - before[0],
                waiting_s + after[1] - before[1],
                moved_bytes + after[2] - before[2],
                hidden_s + after[3] - before[3],
            )
            self._clock.resume()

    def _totals(self) -> _Totals:
        communication_s = waiting_s = hidden_s = 0.0
        moved_bytes = 0
        for timing in self._timings:
            communication_s += timing.communication_s
            waiting_s += timing.waiting_s
            moved_bytes += timing.moved_bytes
            hidden_s += timing.hidden_s
        return communication_s, waiting_s, moved_bytes, hidden_s
