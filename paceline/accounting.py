"""What of a worker's time was computing, moving tensors, and waiting for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from paceline.clock import TrainingClock
from paceline.comm.base import Timing


@dataclass(frozen=True)
class Share:
    """One step's part of the running totals; the three parts add up to the step's whole time."""

    time_s: float
    """Training clock at the end of the step."""
    compute_s: float
    communication_s: float
    waiting_s: float
    moved_bytes: int
    hidden_s: float
    """Of compute_s, the time in which data moved behind it."""


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
        self._booked = Timing()

    def start(self) -> None:
        """The first step begins."""
        self._booked = self._totals()
        self._time_s = self._clock.now_s
        self._clock.resume()

    def close_step(self) -> Share:
        """The step ends now, and the next one begins."""
        now_s, totals, booked = self._clock.now_s, self._totals(), self._booked
        communication_s = totals.communication_s - booked.communication_s
        waiting_s = totals.waiting_s - booked.waiting_s
        compute_s = max(0.0, now_s - self._time_s - communication_s - waiting_s)
        self._time_s, self._booked = now_s, totals
        return Share(
            now_s,
            compute_s,
            communication_s,
            waiting_s,
            totals.moved_bytes - booked.moved_bytes,
            totals.hidden_s - booked.hidden_s,
        )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The clock stands; the step that was under way goes on afterwards."""
        self._clock.pause()
        before = self._totals()
        yield
        after, booked = self._totals(), self._booked
        self._booked = Timing(
            booked.communication_s + after.communication_s - before.communication_s,
            booked.waiting_s + after.waiting_s - before.waiting_s,
            booked.moved_bytes + after.moved_bytes - before.moved_bytes,
            booked.hidden_s + after.hidden_s - before.hidden_s,
        )
        self._clock.resume()

    def _totals(self) -> Timing:
        return Timing(
            sum(timing.communication_s for timing in self._timings),
            sum(timing.waiting_s for timing in self._timings),
            sum(timing.moved_bytes for timing in self._timings),
            sum(timing.hidden_s for timing in self._timings),
        )
