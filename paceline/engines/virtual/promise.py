"""How long others need not wait for what a worker does, because it computes."""

from __future__ import annotations

from typing import final

_ROUNDING = 1e-9, 1e-12
"""Of a step's time, and of the clock: less is promised by so much, since sums of many parts are rounded."""


@final
class Promise:
    """That a worker exchanges nothing before it has computed as much of a step as it had by then in the first one.

    Under parameter servers that is all of it; with buckets, what comes before the first of them is full. Whoever knows
    the promise may let others go on until then. So what is exchanged earlier all the same, as by a script that breaks
    out of its loop with a batch in hand, happens when that time has come; nothing more is promised after that.
    """

    def __init__(self) -> None:
        self._share: float | None = None  # of a step; none: not known yet
        self._step_s: float | None = None  # of the present step; none: not known yet
        self._computed_s = 0.0  # in the present step
        self._is_watched = False
        self._until_s: float | None = None

    def holds(self, now_s: float) -> bool:
        """Whether the worker has one to keep now."""
        return self._until_s is not None and now_s < self._until_s

    def begin(self, now_s: float, step_s: float | None) -> float | None:
        """A step begins; returns until when nothing is exchanged, if that is known.

        Args:
            step_s: what it takes to compute at least, if that is known.
        """
        self._is_watched, self._step_s, self._computed_s = True, None, 0.0
        if self._share and step_s is not None:
            of_step, of_clock = _ROUNDING
            until_s = now_s * (1 - of_clock) + self._share * step_s * (1 - of_step)
            self._until_s = until_s if self._until_s is None else max(until_s, self._until_s)
        return self._until_s

    def takes(self, step_s: float) -> None:
        """What the present step takes to compute."""
        self._step_s = step_s

    def computed(self, duration_s: float) -> None:
        """A part of the present step."""
        self._computed_s += duration_s

    def give_up(self) -> None:
        """Steps are not alike: nothing is promised from now on, but for what has been."""
        self._share = 0.0

    def exchange(self, now_s: float) -> float:
        """The worker would exchange something now; returns when it does."""
        until_s, self._until_s = self._until_s, None
        is_watched, self._is_watched = self._is_watched, False
        if is_watched and self._share is None:
            # Where the step's time is not known yet, something is exchanged before anything has been computed.
            self._share = min(1.0, self._computed_s / self._step_s) if self._step_s else 0.0
        if until_s is None or now_s >= until_s:
            return now_s
        self.give_up()
        return until_s
