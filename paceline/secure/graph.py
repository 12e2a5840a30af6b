"""Who shares secrets with whom."""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple


class Parties(NamedTuple):
    """Who takes part in a round."""

    neighbours: dict[int, frozenset[int]]
    threshold: int
    """How many of a client and its neighbours can undo its mask together."""


def parties(clients: Sequence[int], *, num_neighbours: int | None, part: float, least: int, seed: int) -> Parties:
    """
    Args:
        num_neighbours: of each client, an even number; none, or more than there are: all others.
        part: of a client and its neighbours that has to stay until the end, but at least `least` of them, since fewer
            do not hide one another.
    """
    degree = min(num_neighbours or len(clients), len(clients) - 1)
    threshold = max((degree + 1) // 2 + 1, math.ceil(part * (degree + 1)), min(least, degree + 1))
    return Parties(neighbours(clients, degree=degree, seed=seed), threshold)


def neighbours(clients: Sequence[int], *, degree: int, seed: int) -> dict[int, frozenset[int]]:
    """Each client's neighbours: those beside it on a ring in drawn order, half of them on either side (Bell et al., CCS
    2020, section 3.1). With a degree of all others, the complete graph.

    Raises:
        ValueError: the degree is odd, unless it is that of the complete graph, or there are too few clients for it.
    """
    size = len(clients)
    if degree == size - 1:
        return {client: frozenset(clients) - {client} for client in clients}
    if degree % 2 or not 2 <= degree < size:
        raise ValueError(f"a degree among {size} clients is even and at least 2, or {size - 1}, not {degree}")
    ring = random.Random(seed).sample(list(clients), size)
    reach = [distance for half in range(1, degree // 2 + 1) for distance in (-half, half)]
    return {client: frozenset(ring[(at + each) % size] for each in reach) for at, client in enumerate(ring)}
