"""Who sends how much to whom in a collective operation, round by round."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from paceline.comm.algorithms.chain import PIECE_BYTES, is_worth_a_chain


class Round(NamedTuple):
    """One rank's part of a round: it sends at once, and goes on when it has heard from others."""

    sends: Sequence[tuple[int, float]]
    """Rank and bytes."""
    receives: Sequence[int]
    is_blocking: bool = False
    """Whether it also waits until its messages have arrived."""


class Pattern(Protocol):
    """Yields the rounds of one rank. It is a generator since what a rank passes on may be known only then."""

    def __call__(self, rank: int) -> Iterator[Round]: ...


def all_reduce(hosts: Sequence[Sequence[int]], num_bytes: float) -> Pattern:
    """A ring among the first ranks of the hosts, which get the others' tensors and hand them the result."""
    leaders = [ranks[0] for ranks in hosts]
    ring = ring_all_reduce(leaders, num_bytes)
    host_of = {rank: ranks for ranks in hosts for rank in ranks}

    def rounds(rank: int) -> Iterator[Round]:
        leader, *others = host_of[rank]
        if rank != leader:
            yield Round(((leader, num_bytes),), (leader,))
            return
        if others:
            yield Round((), others)
        if len(leaders) > 1:
            yield from ring(rank)
        if others:
            yield Round([(other, num_bytes) for other in others], ())

    return rounds


def ring_all_reduce(ranks: Sequence[int], num_bytes: float) -> Pattern:
    """As `comm.algorithms.ring`: in each of 2 (n - 1) rounds a rank passes one n-th on to the next.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
    """
    size = len(ranks)
    place_of = {rank: place for place, rank in enumerate(ranks)}
    part_bytes = num_bytes / size

    def rounds(rank: int) -> Iterator[Round]:
        place = place_of[rank]
        one = Round(((ranks[(place + 1) % size], part_bytes),), (ranks[place - 1],))
        for _ in range(2 * (size - 1)):
            yield one

    return rounds


def all_gather(size: int, bytes_of: Mapping[int, float]) -> Pattern:
    """Bruck's: in round j a rank sends all it has, up to 2**j tensors, to the rank 2**j before it.

    Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS
    8(11), 1997, section 4: ceil(log2 n) rounds, and no byte more than has to be sent. A rank's bytes are looked up once
    it takes part.
    """

    def rounds(rank: int) -> Iterator[Round]:
        distance = 1
        while distance < size:
            held = [(rank + offset) % size for offset in range(min(distance, size - distance))]
            yield Round(
                (((rank - distance) % size, sum(bytes_of[other] for other in held)),), ((rank + distance) % size,)
            )
            distance *= 2

    return rounds


def broadcast(size: int, root: int, num_bytes: float) -> Pattern:
    """As between real hosts: along a chain where that is worth it, else down a binomial tree."""
    pattern = _chain if is_worth_a_chain(num_bytes, size=size) else _binomial_tree
    return pattern(size, root, num_bytes)


def _chain(size: int, root: int, num_bytes: float) -> Pattern:
    """As `comm.algorithms.chain`: every rank passes each piece on to the next one."""
    num_pieces = math.ceil(num_bytes / PIECE_BYTES)

    def rounds(rank: int) -> Iterator[Round]:
        previous, following = (rank - 1) % size, (rank + 1) % size
        for number in range(num_pieces):
            if rank != root:
                yield Round((), (previous,))
            if following != root:
                yield Round(((following, min(PIECE_BYTES, num_bytes - number * PIECE_BYTES)),), ())

    return rounds


def _binomial_tree(size: int, root: int, num_bytes: float) -> Pattern:
    """In round j the 2**j ranks that have the tensor send it to as many others."""

    def rounds(rank: int) -> Iterator[Round]:
        place = (rank - root) % size
        if place:
            parent = place - (1 << (place.bit_length() - 1))
            yield Round((), ((parent + root) % size,))
        reach = 1 << place.bit_length() if place else 1
        while place + reach < size:
            yield Round((((place + reach + root) % size, num_bytes),), (), is_blocking=True)
            reach *= 2

    return rounds


def gather(size: int, root: int, bytes_of: Mapping[int, float]) -> Pattern:
    """Everyone sends to the root at once."""

    def rounds(rank: int) -> Iterator[Round]:
        if rank == root:
            yield Round((), [other for other in range(size) if other != root])
        else:
            yield Round(((root, bytes_of[rank]),), ())

    return rounds


def scatter(size: int, root: int, bytes_for: Mapping[int, Sequence[float]]) -> Pattern:
    """The root sends to everyone at once; `bytes_for[root][i]` is for rank i."""

    def rounds(rank: int) -> Iterator[Round]:
        if rank == root:
            yield Round([(other, bytes_for[root][other]) for other in range(size) if other != root], ())
        else:
            yield Round((), (root,))

    return rounds


def all_to_all(size: int, bytes_for: Mapping[int, Sequence[float]]) -> Pattern:
    """Everyone sends to everyone at once; `bytes_for[s][d]` is what rank s sends to rank d."""

    def rounds(rank: int) -> Iterator[Round]:
        others = [(rank + distance) % size for distance in range(1, size)]
        yield Round([(other, bytes_for[rank][other]) for other in others], others)

    return rounds
