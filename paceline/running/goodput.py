"""The part of all workers' time that was of use, where some died, left and came."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, final

from paceline.records import EventRecord

_PARTS = ("lost_regrouping_s", "lost_steps_s", "lost_starting_s")


@final
@dataclass(frozen=True)
class Goodput:
    """Parts of the workers' time."""

    goodput: float
    regrouping: float
    """Those that were left waited to go on."""
    steps: float = math.nan
    """What was computed by the dead, and again by others; unknown of real runs."""
    starting: float = math.nan
    """Workers started and took a state; unknown of real runs, where others train on meanwhile."""
    cost: float = math.nan
    """What the workers' hosts cost; unknown of real ones."""

    @classmethod
    def of(cls, events: Sequence[EventRecord], *, worker_s: Callable[[], float]) -> Self | None:
        """What a run's events say; none where nobody could die. A simulated run has counted itself. `worker_s`: what
        all workers' recorded steps took."""
        told = [event.details for event in events if event.name == "goodput"]
        if told:
            whole_s = sum(details["worker_s"] for details in told)
            lost_s = [sum(details[part] for details in told) for part in _PARTS]
            regrouping, steps, starting = (part_s / whole_s if whole_s else 0.0 for part_s in lost_s)
            cost = sum(details["cost"] for details in told)
            return cls(1 - regrouping - steps - starting, regrouping, steps, starting, cost)
        reformed = [event.details for event in events if event.name == "reformed"]
        if not reformed:
            return None
        waited_s = sum(each["took_s"] * (len(each["ranks"]) - len(each["joined"])) for each in reformed)
        part = waited_s / worker_s() if worker_s() else 0.0
        return cls(1 - part, part)
