"""The Base-(k+1) graph: at most k neighbours a step, and the exact mean after a few steps among any number of workers.

Takezawa et al., "Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized Learning via
Finite-time Convergence", NeurIPS 2023. Links go both ways; a worker keeps what its links' weights leave of one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import final

from paceline.topology.base import Topology

_Links = dict[tuple[int, int], float]
"""One step's: the weight of each pair."""


@final
@dataclass(frozen=True)
class BaseK(Topology, name="base-k"):
    """The mean of all after each period.

    >>> [BaseK().period(size) for size in (3, 5, 6, 7, 12, 16, 25)]
    [3, 5, 4, 5, 5, 4, 9]
    """

    k: int = 1
    """The most neighbours at a step."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be at least 1, not {self.k}")

    def period(self, size: int) -> int:
        return max(1, len(_sequence(size, self.k)))

    def sources(self, step: int, rank: int, size: int) -> Mapping[int, float]:
        links = _sequence(size, self.k)[step] if size > 1 else {}
        weights = {a + b - rank: weight for (a, b), weight in links.items() if rank in (a, b)}
        return {rank: 1 - sum(weights.values()), **dict(sorted(weights.items()))}


@lru_cache(maxsize=64)
def _sequence(size: int, k: int) -> list[_Links]:
    """Algorithm 3: as many simple graphs side by side as the size has small factors, then hypercubes across them."""
    nodes = range(size)
    simple = _simple(nodes, k)
    num_sets = _smooth_part(size, k)
    length = size // num_sets
    sets = [nodes[start : start + length] for start in range(0, size, length)]
    inside = _side_by_side([_simple(each, k) for each in sets])
    across = _side_by_side([_hypercube(each, k) for each in zip(*sets, strict=True)])
    full = inside + across
    return full if len(full) < len(simple) else simple


def _simple(nodes: Sequence[int], k: int) -> list[_Links]:
    """Algorithm 2: sets whose sizes are the digits of the number of nodes in base k + 1, largest first.

    Each set takes its own mean; then each in turn exchanges with all smaller ones, so that the parts of the set have
    the mean of all, and takes it in each part.
    """
    if _smooth_part(len(nodes), k) == len(nodes):
        return _hypercube(nodes, k)
    sets: list[list[Sequence[int]]] = []  # each of as many equal parts as its digit says
    start = 0
    for power in reversed(range(len(nodes).bit_length())):
        part = (k + 1) ** power
        count = (len(nodes) - start) // part
        if count:
            sets.append([nodes[start + place * part : start + (place + 1) * part] for place in range(count)])
            start += count * part
    wholes = [[node for part in parts for node in part] for parts in sets]
    own = [_hypercube(whole, k) for whole in wholes]
    within = [_side_by_side([_hypercube(part, k) for part in parts]) for parts in sets]
    num_own, num_steps = len(own[0]), len(own[0]) + 1 + len(within[0])
    sequence: list[_Links] = []
    for step in range(num_steps):
        links: _Links = {}
        for place in range(len(sets)):
            if step < num_own:
                links |= _turn(own[place], step)
            elif step - num_own == place < len(sets) - 1:
                links |= _downward(sets[place], wholes[place + 1 :], k)
            elif step - num_own > place:
                links |= _turn(within[place], step - num_own - place - 1)
        sequence.append(links)
    return sequence


def _downward(parts: Sequence[Sequence[int]], smaller: Sequence[Sequence[int]], k: int) -> _Links:
    """Every node of the smaller sets exchanges with one node of each part; those of the parts that are left mix among
    themselves."""
    others = [node for each in smaller for node in each]
    size = sum(map(len, parts))
    weight = size / (len(parts) * (size + len(others)))
    links = {(mine, other): weight for part in parts for mine, other in zip(part, others, strict=False)}
    left = [node for part in parts for node in part[len(others) :]]
    for group in (left[start : start + k + 1] for start in range(0, len(left), k + 1)):
        links |= dict.fromkeys(combinations(group, 2), 1 / len(group))
    return links


def _hypercube(nodes: Sequence[int], k: int) -> list[_Links]:
    """Algorithm 1, the k-peer hyper-hypercube: in the l-th step, nodes that differ in the l-th digit alone."""
    sequence: list[_Links] = []
    stride = 1
    for factor in _factors(len(nodes), k):
        links: _Links = {}
        for start, node in enumerate(nodes):
            if start // stride % factor == 0:
                group = [node, *(nodes[start + place * stride] for place in range(1, factor))]
                links |= dict.fromkeys(combinations(group, 2), 1 / factor)
        sequence.append(links)
        stride *= factor
    return sequence


def _side_by_side(sequences: Sequence[list[_Links]]) -> list[_Links]:
    return [{pair: weight for links in step for pair, weight in links.items()} for step in zip(*sequences, strict=True)]


def _turn(sequence: list[_Links], number: int) -> _Links:
    """The sequence repeats."""
    return sequence[number % len(sequence)] if sequence else {}


def _smooth_part(size: int, k: int) -> int:
    """The largest divisor that has no prime factor above k + 1."""
    part = 1
    for factor in range(2, k + 2):
        while size % factor == 0:
            size, part = size // factor, part * factor
    return part


@lru_cache(maxsize=1024)
def _factors(size: int, k: int) -> tuple[int, ...]:
    """As few factors as possible, each at most k + 1."""
    if size == 1:
        return ()
    divisors = [factor for factor in range(2, k + 2) if size % factor == 0]
    return min(((factor, *_factors(size // factor, k)) for factor in divisors), key=len)
