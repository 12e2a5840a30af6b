"""How long others need not wait for what a worker does, because it computes."""

from __future__ import annotations

import math
from typing import final

_ROUNDING = 1e-9, 1e-12
"""Of a step's time, and of the clock: less is promised by so much, since sums of many parts are rounded."""


def kept_until(now_s: float, duration_s: float) -> float:
    """When a promise has been kept that was made now for so long."""
    of_step, of_clock = _ROUNDING
    return now_s * (1 - of_clock) + duration_s * (1 - of_step)


@final
class Promise:
    """That a worker exchanges nothing before it has computed as much of a step as it had by then in the first one.

    Under parameter servers that is all of it; with buckets, what comes before the first of them is full. Whoever knows
    the promise may let others go on until then. So what is exchanged earlier all the same, as by a script that breaks
    out of its loop with a batch in hand, happens when that time has come; nothing more is promised after that.

    Where the data go on, a worker promises the same for what it computes next as soon as it waits for the last thing
    that it exchanges from one optimizer step's first pass to the next one's: for when it will have been answered. It is
    the last if so many were the most in all steps so far. Who then exchanges more than ever before is late, too; after
    that, only as many as these are followed by a promise.
    """

    def __init__(self) -> None:
        self.next_step_s: float | None = None
        """What the worker computes next takes at least, if that comes at once; none: not known, or it may not."""
        self._share: float | None = None  # of a step; none: not known yet
        self._step_s: float | None = None  # of the present step; none: not known yet
        self._computed_s = 0.0  # in the present step
        self._is_watched = False
        self._until_s: float | None = None
        self._has_stepped = False  # the optimizer, since the present step began
        self._num_exchanges: int | None = None  # since then; none: what is exchanged is of no step
        self._most_exchanges: int | None = None  # in a step so far; the first one, in which strategies set up, is none

    @property
    def until_s(self) -> float:
        """The time of the promise to keep, or long ago."""
        return -math.inf if self._until_s is None else self._until_s

    @property
    def ahead_s(self) -> float | None:
        """For how long nothing will be exchanged once the worker, which waits now, is answered; none: not known."""
        is_last = self._num_exchanges and self._num_exchanges == self._most_exchanges
        return self._share * self.next_step_s if is_last and self._share and self.next_step_s is not None else None

    def holds(self, now_s: float) -> bool:
        """Whether the worker has one to keep now."""
        return self._until_s is not None and now_s < self._until_s

    def begin(self, now_s: float, step_s: float | None) -> float | None:
        """A pass begins; returns until when nothing is exchanged, if that is known.

        Args:
            step_s: what it takes to compute at least, if that is known.
        """
        if self._has_stepped:
            self.end_step()
        self._num_exchanges = self._num_exchanges or 0
        self._is_watched, self._step_s, self._computed_s = True, None, 0.0
        if self._share and step_s is not None:
            self._until_s = max(kept_until(now_s, self._share * step_s), self.until_s)
        return self._until_s

    def takes(self, step_s: float) -> None:
        """What the present step takes to compute."""
        self._step_s = step_s

    def computed(self, duration_s: float) -> None:
        """A part of the present step."""
        self._computed_s += duration_s

    def end_step(self) -> None:
        """What is exchanged from now on is of no step, until another one begins."""
        num_exchanges, self._num_exchanges = self._num_exchanges, None
        has_stepped, self._has_stepped = self._has_stepped, False
        if num_exchanges and has_stepped and self._most_exchanges is None:
            self._most_exchanges = 0
        elif num_exchanges and self._most_exchanges is not None and self.next_step_s is not None:
            self._most_exchanges = max(self._most_exchanges, num_exchanges)

    def stepped(self) -> None:
        """The optimizer has."""
        self._has_stepped = True

    def answered(self, now_s: float) -> None:
        """What the worker waited for is over."""
        if self.ahead_s is not None:
            self._until_s = kept_until(now_s, self.ahead_s)

    def give_up(self) -> None:
        """Steps are not alike: nothing is promised from now on, but for what has been."""
        self._share = 0.0

    def exchange(self, now_s: float) -> float:
        """The worker would exchange something now; returns when it does."""
        until_s, self._until_s = self._until_s, None
        is_watched, self._is_watched = self._is_watched, False
        if self._num_exchanges is not None:
            self._num_exchanges += 1
        if is_watched and self._share is None:
            # Where the step's time is not known yet, something is exchanged before anything has been computed.
            self._share = min(1.0, self._computed_s / self._step_s) if self._step_s else 0.0
        if until_s is None or now_s >= until_s:
            return now_s
        if is_watched:
            self.give_up()
        return until_s
