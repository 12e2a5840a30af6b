"""Where the time of an iteration goes, in parts that add up to it. Pure: no clock is read here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import TypeVar

T = TypeVar("T")

WORTH_IT = 0.1
"""More tasks that save less than this part of an iteration do not count as a gain."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What the driver and the map tasks have timed in one iteration, all in seconds; lists have a place a task.

    Only durations of a task come from its own clock, so clocks of several hosts need not agree.
    """

    broadcast_s: float
    """To put the parameters where tasks fetch them."""
    arrived_s: Sequence[float]
    """From there to the driver's hearing that the task is done."""
    fetch_s: Sequence[float]
    compute_s: Sequence[float]
    collect_s: float
    """To get all results, once the last is there."""
    join_s: float
    """To reduce and update."""
    moved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Parts:
    """An iteration's time by cause."""

    computing_s: float
    """The mean task's map function, the reduce and the update."""
    bytes_s: float
    """Broadcast, the mean task's fetch of the parameters, and collecting the results."""
    latency_s: float
    """The mean task's remaining time: to be scheduled and started, to wait for a core, and to report."""
    straggler_s: float
    """How long the last task comes after the mean one."""

    @property
    def wall_s(self) -> float:
        return self.computing_s + self.bytes_s + self.latency_s + self.straggler_s


def account(observed: Observed) -> Parts:
    """Divide the time from the broadcast's begin to the update's end. The parts add up to it, and none is negative."""
    arrived_s, fetch_s, compute_s = (fmean(each) for each in (observed.arrived_s, observed.fetch_s, observed.compute_s))
    return Parts(
        computing_s=compute_s + observed.join_s,
        bytes_s=observed.broadcast_s + fetch_s + observed.collect_s,
        latency_s=arrived_s - fetch_s - compute_s,
        straggler_s=max(observed.arrived_s) - arrived_s,
    )


def middle_half(values: Sequence[T], length: Callable[[T], float]) -> list[T]:
    """Without the quarter that is shortest and the one that is longest, in which other programs had the cores."""
    ordered = sorted(values, key=length)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def mean_parts(iterations: Sequence[Parts]) -> Parts:
    """The mean of the middle half, part by part, so that the means add up to the mean iteration."""
    kept = middle_half(iterations, lambda each: each.wall_s)
    return Parts(**{field.name: fmean([getattr(each, field.name) for each in kept]) for field in fields(Parts)})


def flattens_at(iteration_s: Mapping[int, float]) -> int | None:
    """The least number of tasks from which no larger number here makes an iteration shorter by a tenth.

    None if that is the largest number, beyond which nothing was measured.
    """
    numbers = sorted(iteration_s)
    for place, number in enumerate(numbers[:-1]):
        if min(iteration_s[larger] for larger in numbers[place + 1 :]) > (1 - WORTH_IT) * iteration_s[number]:
            return number
    return None
