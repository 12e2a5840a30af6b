"""What it costs that workers' models differ between exchanges: how many more steps they take to a target.

In the model of McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, a loss is quadratic around where
training is. There workers that train apart and take means make as much of a step as one worker with all their samples
(Woodworth et al., "Is Local SGD Better than Minibatch SGD?", ICML 2020, section 3), but at a learning rate that bears
the noise of one model. Of that noise a part is the worker's own, since no exchange has averaged it yet: the larger,
the rarer exchanges are and the fewer neighbours there are. Data are taken to be alike on all workers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from paceline.planner.noise import NoiseScale
from paceline.strategies.traits import AllReduced, Neighbouring, Served, Traits
from paceline.topology import Topology

_NUM_RANKS, _NUM_STARTS = 4, 4  # workers that are looked at, and steps of a topology's period from which they are
_MOST_EXCHANGES = 100
_ALIKE = 1e-3  # what is left of a difference that no longer counts
_NUM_HALVINGS = 40


@final
@dataclass(frozen=True)
class Apart:
    """How workers' models come together."""

    every: int
    """Steps from one exchange to the next."""
    left: tuple[float, ...]
    """Of a worker's own noise, by how many exchanges it has been through; what comes after is as the last."""
    lag: int = 0
    """Steps that a worker takes while an exchange is under way, and knows nothing of it."""

    @classmethod
    def of(cls, traits: Traits, num_workers: int) -> "Apart | None":
        """None where no rule says it."""
        traffic = traits.traffic[0] if traits.traffic else None
        if isinstance(traffic, AllReduced) and traits.unit == "round" and not traffic.delay:
            return cls(traffic.every, (1.0, 0.0))
        if isinstance(traffic, Served) and traffic.quorum is not None:
            return cls(traffic.every, (1.0, 0.0))
        if isinstance(traffic, Neighbouring) and traffic.takes_means:
            return cls(traffic.every, _left(traffic.topology, num_workers), int(traffic.behind_computing))
        return None

    def drift(self, noise: NoiseScale, *, batch: float, num_workers: float) -> float:
        """How many times the steps to a target are needed that workers who average every gradient need.

        At r times the learning rate that suits an infinite batch, a step gets 2 r - r^2 (1 + B_noise / B) of the way
        that such a batch's best does (McCandlish et al., equation 2.6), B being all workers' batch. The rate is r =
        1 / (1 + B_noise / B') for the batch B' whose noise is that of one worker's model.

        Args:
            batch: of one worker.
            num_workers: whose models an exchange joins.
        """
        if math.isinf(noise.samples):
            return 1.0
        alone, together = noise.samples / batch, noise.samples / (batch * num_workers)
        low, high = 0.0, 1.0
        for _ in range(_NUM_HALVINGS):  # the longer noise is remembered, the less of it is a worker's own
            own = (low + high) / 2
            if self.own_share(1 + own * alone + (1 - own) * together) > own:
                low = own
            else:
                high = own
        inverse_rate = 1 + low * alone + (1 - low) * together
        return inverse_rate**2 / (2 * inverse_rate - (1 + together)) / (1 + together)

    def own_share(self, memory: float) -> float:
        """The part of the noise in a worker's model that is its own, the mean over the steps between two exchanges.

        Args:
            memory: steps after which a model has forgotten noise, as their mean: what curvature takes back a step is
                one over it.
        """
        kept = 1 - 1 / memory
        if not kept:
            return 0.0
        over = kept**self.every
        met = kept**self.lag * (1 - over) / (self.every * (1 - kept))  # the chance that an exchange has seen it
        later = sum(own * over**number for number, own in enumerate(self.left[1:])) * (1 - over)
        later += self.left[-1] * over ** (len(self.left) - 1)
        return 1 - met * (1 - later)


@lru_cache(maxsize=256)
def _left(topology: Topology, size: int) -> tuple[float, ...]:
    """After 0, 1, 2, ... exchanges: 1 is a model of one's own, 0 the mean of all. The mean over some workers."""
    period = topology.period(size)
    starts = range(0, period, max(1, period // _NUM_STARTS))
    rows = [(start, {rank: 1.0}) for start in starts for rank in range(0, size, max(1, size // _NUM_RANKS))]
    found = [1.0]
    while found[-1] > _ALIKE and len(found) <= _MOST_EXCHANGES:
        step = len(found) - 1
        rows = [(start, _mixed(topology, (start - step) % period, row, size)) for start, row in rows]
        found.append(sum(_excess([*row.values()], size) for _, row in rows) / len(rows))
    return tuple(found)


def _mixed(topology: Topology, step: int, row: Mapping[int, float], size: int) -> dict[int, float]:
    """A row of a product of mixing matrices, with one more of an earlier step."""
    found: dict[int, float] = {}
    for rank, weight in row.items():
        for source, part in topology.sources(step, rank, size).items():
            found[source] = found.get(source, 0.0) + weight * part
    return found


def _excess(weights: Sequence[float], size: int) -> float:
    """How far the squares of weights are from those of the mean of all, beside those of one alone."""
    return max(0.0, size * sum(weight**2 for weight in weights) - 1) / max(1, size - 1)
