"""Topologies whose neighbours change from step to step."""

import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import final

from paceline.topology.base import Topology
from paceline.topology.fixed import Ring, metropolis_hastings


@final
@dataclass(frozen=True)
class OnePeerExponential(Topology, name="one-peer"):
    """To the worker 1, 2, 4, ... places on, one at a step, in turns; half of each (Assran et al., ICML 2019).

    Among a power of two of workers a period takes all to their mean (Ying et al., NeurIPS 2021, section 4).
    """

    def period(self, size: int) -> int:
        return max(1, (size - 1).bit_length())

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        return {rank: 0.5, (rank - 2**step) % size: 0.5} if size > 1 else {rank: 1.0}


@dataclass(frozen=True)
class _Drawn(Topology):
    """Draws that are the same on every worker, and repeat. Links count both ways."""

    is_symmetric = True

    seed: int = field(default=0, kw_only=True)
    num_draws: int = field(default=64, kw_only=True)
    """Steps after which they repeat."""

    def __post_init__(self) -> None:
        if self.num_draws < 1:
            raise ValueError(f"num_draws must be at least 1, not {self.num_draws}")

    @final
    def period(self, size: int) -> int:
        return self.num_draws if size > 1 else 1

    @final
    def draw(self, step: int) -> random.Random:
        return random.Random(f"{self.seed} {step}")


@final
@dataclass(frozen=True)
class RandomPairs(_Drawn, name="random-pairs"):
    """Each step draws pairs anew, whose two workers take their mean; of an odd number one is left out (Boyd et al.,
    "Randomized gossip algorithms", IEEE Transactions on Information Theory 52(6), 2006, but all pairs at once)."""

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        partner = _partners(self, step, size).get(rank)
        return {rank: 1.0} if partner is None else {rank: 0.5, partner: 0.5}


@lru_cache(maxsize=512)
def _partners(pairs: RandomPairs, step: int, size: int) -> Mapping[int, int]:
    """Whoever has one at this step."""
    order = list(range(size))
    pairs.draw(step).shuffle(order)
    return {order[place]: order[place ^ 1] for place in range(size - size % 2)}


@final
@dataclass(frozen=True)
class Matcha(_Drawn, name="matcha"):
    """A graph's links in matchings, of which each step draws some (Wang et al., "MATCHA", ICC 2019).

    Unlike there, every matching has the same chance, and weights are Metropolis-Hastings' among the links drawn.
    """

    of: Topology = field(default_factory=Ring)
    """The graph. Its links count both ways, and as at its first step."""
    budget: float = 0.5
    """The chance of each matching, and so what a step moves, as a part of what the graph would."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget must be above 0 and at most 1, not {self.budget}")

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        near = _drawn_links(self, step, size)
        return metropolis_hastings(rank, near[rank], {other: len(near[other]) for other in (rank, *near[rank])})


@lru_cache(maxsize=512)
def _drawn_links(matcha: Matcha, step: int, size: int) -> Sequence[Set[int]]:
    """The links of every worker that were drawn for this step."""
    draw = matcha.draw(step)
    drawn = [matching for matching in matchings(matcha.of, size) if draw.random() < matcha.budget]
    return [{pairs[rank] for pairs in drawn if rank in pairs} for rank in range(size)]


@lru_cache(maxsize=64)
def matchings(topology: Topology, size: int) -> tuple[Mapping[int, int], ...]:
    """All links of the first step, so that no two of a matching share a worker; each as both of its directions.

    Greedy: a link goes to the first matching that has neither end, so there are less than twice as many as a worker
    has neighbours.
    """
    found: list[dict[int, int]] = []
    links = {(min(a, b), max(a, b)) for a in range(size) for b in topology.sources(0, a, size) if a != b}
    for one, other in sorted(links):
        matching = next((pairs for pairs in found if one not in pairs and other not in pairs), None)
        if matching is None:
            found.append(matching := {})
        matching |= {one: other, other: one}
    return tuple(found)
