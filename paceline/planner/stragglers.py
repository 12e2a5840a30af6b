"""How long the slowest, or the slowest but some, of many workers compute: order statistics of step times."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import final

import numpy as np
import torch

from paceline.cluster.description import Compute
from paceline.planner.fabric import Floats

_TAIL = 1e-12  # chance of what is left out of an expectation on either side
_NUM_POINTS = 4000
_MOST_PAUSES = 3
_BESIDE = 1e-9  # the distance of a jump's two sides from it, relative to where it is


@final
@dataclass(frozen=True)
class StepTimes:
    """The distribution that the virtual engine draws from: a factor around a mean, and pauses."""

    compute: Compute
    mean_s: float
    """Without pauses."""

    @cached_property
    def expected_s(self) -> float:
        """With pauses."""
        return self.mean_s * (1 + self.compute.pauses_per_hour / 3600 * self.compute.pause_s)

    @cached_property
    def variance_s2(self) -> float:
        """Variance of the seconds that a step takes, pauses included."""
        factor = {
            "constant": 0.0,
            "log-normal": (self.compute.variation or 0.0) ** 2,
            "exponential": 1.0,
            "trace": float(np.var(self._trace)) if self.compute.trace_s else 0.0,
        }[self.compute.distribution]
        pauses = self.compute.pauses_per_hour / 3600 * self.mean_s
        return factor * self.mean_s**2 + pauses * self.compute.pause_s**2

    def longer(self, times_s: Floats) -> Floats:
        """The chance that a step takes longer than each of these times; the number of pauses is Poisson's."""
        if not self.compute.pauses_per_hour:
            return self._longer_without(times_s)
        rate = self.compute.pauses_per_hour / 3600 * self.mean_s
        chances = [math.exp(-rate) * rate**count / math.factorial(count) for count in range(_MOST_PAUSES)]
        chances.append(1 - sum(chances))
        parts = [
            chance * self._longer_without(times_s - count * self.compute.pause_s)
            for count, chance in enumerate(chances)
        ]
        found: Floats = np.clip(np.sum(parts, axis=0), 0.0, 1.0)
        return found

    def points_s(self) -> Floats:
        """Times between which the distribution is nearly linear, with both sides of every jump."""
        compute = self.compute
        if compute.distribution == "constant":
            own = np.array([self.mean_s])
        elif compute.distribution == "trace":
            own = np.unique(self._trace) * self.mean_s
        else:
            own = self._quantiles(_NUM_POINTS)
        pauses = range(_MOST_PAUSES + 1 if compute.pauses_per_hour else 1)
        shifted = np.concatenate([own + count * compute.pause_s for count in pauses])
        return np.concatenate([shifted * (1 - _BESIDE), shifted * (1 + _BESIDE)])

    def at(self, chances: Floats) -> Floats:
        """Quantiles: uniform chances give typical steps."""
        points, at_most = _inverse(self)
        return np.interp(chances, at_most, points)

    @cached_property
    def _trace(self) -> Floats:
        trace = np.array(self.compute.trace_s, dtype=np.float64)
        return trace / float(trace.mean())

    @cached_property
    def _sigma(self) -> float:
        return math.sqrt(math.log1p((self.compute.variation or 0.0) ** 2))

    def _longer_without(self, times_s: Floats) -> Floats:
        """Pauses left out."""
        factors = times_s / self.mean_s
        kind = self.compute.distribution
        if kind == "constant":
            return np.where(factors < 1.0, 1.0, 0.0)
        if kind == "trace":
            ordered = np.sort(self._trace)
            return 1 - np.searchsorted(ordered * self.mean_s, times_s, side="right") / len(ordered)
        positive = np.maximum(factors, 1e-300)
        if kind == "exponential":
            return np.where(factors > 0, np.exp(-positive), 1.0)
        z = (np.log(positive) + self._sigma**2 / 2) / self._sigma
        chances: Floats = torch.special.ndtr(torch.from_numpy(-z)).numpy()
        return chances

    def _quantiles(self, count: int) -> Floats:
        """At chances that lie close together near 0 and 1."""
        logits = np.linspace(math.log(_TAIL), -math.log(_TAIL), count)
        longer = 1 / (1 + np.exp(logits))
        if self.compute.distribution == "exponential":
            times: Floats = -np.log(longer) * self.mean_s
            return times
        z: Floats = -torch.special.ndtri(torch.from_numpy(longer)).numpy()
        factors: Floats = np.exp(self._sigma * z - self._sigma**2 / 2)
        return factors * self.mean_s


@lru_cache(maxsize=64)
def _inverse(times: StepTimes) -> tuple[Floats, Floats]:
    """Times, and the chance that a step does not exceed each."""
    points = np.unique(times.points_s())
    return points, 1 - times.longer(points)


@dataclass(frozen=True)
class Group:
    """Workers whose hosts are alike."""

    times: StepTimes
    """Where workers take turns at a core, as if all on it did nothing else and each took as long as this one."""
    count: int
    num_sharing: int = 1
    """Workers that take turns at a core of one."""


def expected_s(groups: Sequence[Group], *, left_out: int = 0, num_steps: float = 1) -> float:
    """The mean time of the slowest worker but `left_out`: of n workers the order statistic n - `left_out`.

    Of alike exponential times and none left out, H_n = 1 + 1/2 + ... + 1/n times the mean; with b left out,
    H_n - H_b (Chen et al., "Revisiting Distributed Synchronous SGD", 2016, section 3.1, measure the gain; David and
    Nagaraja, "Order Statistics", 2003, section 2.1, give the distribution: at most b of n are later).

    Args:
        num_steps: that each worker takes before it waits; the time is that of one of them. What chance adds to the
            slowest falls with the root of their number, as deviations of means do.
    """
    found_s = _expected_s(tuple(groups), left_out)
    return found_s - (found_s - _steady_s(groups, left_out)) * (1 - 1 / math.sqrt(num_steps))


def _steady_s(groups: Sequence[Group], left_out: int) -> float:
    """What it would be if every worker always took its mean."""
    means_s = sorted(((group.times.expected_s, group.count) for group in groups), reverse=True)
    slower = accumulate(count for _, count in means_s)
    return next(mean_s for (mean_s, _), count in zip(means_s, slower, strict=True) if count > left_out)


@lru_cache(maxsize=4096)
def _expected_s(groups: tuple[Group, ...], left_out: int) -> float:
    points = np.unique(np.concatenate([group.times.points_s() for group in groups]))
    points = np.concatenate([[0.0], points[points > 0]])
    at_most = np.zeros((left_out + 1, len(points)))  # by how many, the chance that so many take longer
    at_most[0] = 1.0
    for group in groups:
        own = _binomial(group.count, group.times.longer(points), most=left_out)
        joined = np.zeros_like(at_most)
        for number in range(left_out + 1):
            for mine in range(number + 1):
                joined[number] += at_most[number - mine] * own[mine]
        at_most = joined
    still_waiting = 1 - np.clip(at_most.sum(axis=0), 0.0, 1.0)
    return float(np.sum(np.diff(points) * (still_waiting[1:] + still_waiting[:-1]) / 2))


def _binomial(count: int, chance: Floats, *, most: int) -> Floats:
    """The chances that 0, 1, ..., `most` of `count` events happen, a row each."""
    found = np.zeros((most + 1, len(chance)))
    with np.errstate(divide="ignore"):
        yes, no = np.log(chance), np.log1p(-chance)
    for number in range(min(most, count) + 1):
        ways = math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1)
        happens = number * yes if number else np.zeros_like(yes)
        happens_not = (count - number) * no if count > number else np.zeros_like(no)
        found[number] = np.exp(ways + happens + happens_not)
    return found
