"""What exchanges cost in closed form, without a cluster: M is `num_bytes`, B is `bytes_per_s` of one direction of a
full-duplex card, L is `latency_s` of a message, one way."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.planner.fabric import Floats


def ring_s(num_hosts: int, num_bytes: float, *, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """All-reduce around a ring: 2 (n - 1) (M / (n B) + L).

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009,
    theorem 1 and section 4: nothing sends less than 2 (n - 1) / n times the tensor.
    """
    if num_hosts == 1:
        return 0.0
    return 2 * (num_hosts - 1) * (num_bytes / (num_hosts * bytes_per_s) + latency_s)


def halving_doubling_s(num_ranks: int, num_bytes: float, *, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """All-reduce by recursive halving and doubling: 2 (p - 1) / p M / B + 2 log2(p) L among p = 2**k ranks.

    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005,
    section 4.5. Other numbers first fold into the largest power of two below: two messages of the whole tensor more.
    """
    if num_ranks == 1:
        return 0.0
    levels = num_ranks.bit_length() - 1
    paired = 1 << levels
    folding_s = 0.0 if paired == num_ranks else 2 * (num_bytes / bytes_per_s + latency_s)
    return folding_s + 2 * (paired - 1) / paired * num_bytes / bytes_per_s + 2 * levels * latency_s


def burst_s(num_messages: int, *, each_s: float, message_s: float = 0.0, further_s: float | None = None) -> float:
    """A rank posts k messages, the first one in c = `message_s` and each other one in c' = `further_s` (none: c, too).
    Each keeps its card busy for t = `each_s`: c + t + (k - 1) max(c', t) until the last has left."""
    further_s = message_s if further_s is None else further_s
    return message_s + each_s + (num_messages - 1) * max(further_s, each_s)


def reduce_broadcast_s(
    num_ranks: int,
    num_bytes: float,
    *,
    bytes_per_s: float,
    latency_s: float = 0.0,
    piece_bytes: float = math.inf,
    message_s: float = 0.0,
    further_s: float | None = None,
) -> float:
    """All to one rank and back: (n - 1) M / B in, as much out, which begins with the first piece that is reduced
    (Dean and Ghemawat, "MapReduce", OSDI 2004, section 3.1, with one reducer)."""
    if num_ranks == 1:
        return 0.0
    piece_bytes = min(piece_bytes, num_bytes)
    piece_s = piece_bytes / bytes_per_s
    out_s = burst_s(num_ranks - 1, each_s=piece_s, message_s=message_s, further_s=further_s)
    return message_s + pipeline_s([(num_ranks - 1) * piece_s, out_s], num_bytes / piece_bytes) + 2 * latency_s


def all_to_all_s(
    num_ranks: int,
    num_bytes: float,
    *,
    bytes_per_s: float,
    latency_s: float = 0.0,
    piece_bytes: float = math.inf,
    message_s: float = 0.0,
    further_s: float | None = None,
) -> float:
    """By direct exchange, everyone with everyone: 2 (n - 1) M / (n B) + 2 L (Thakur, Rabenseifner and Gropp,
    section 4.4, all pairs at once), which is what servers on every worker's host cost, too."""
    if num_ranks == 1:
        return 0.0
    piece_bytes = min(piece_bytes, num_bytes / num_ranks)
    pieces = math.ceil(num_bytes / num_ranks / piece_bytes)
    each_s = num_bytes / num_ranks / pieces / bytes_per_s
    return 2 * (burst_s((num_ranks - 1) * pieces, each_s=each_s, message_s=message_s, further_s=further_s) + latency_s)


def pipeline_s(stages_s: Sequence[float], num_pieces: float) -> float:
    """When the last of alike pieces has passed all stages: the first passes all, then one follows every slowest stage
    (the makespan of a permutation flow shop with equal jobs). A smaller last piece counts in proportion."""
    return sum(stages_s) + (max(num_pieces, 1.0) - 1) * max(stages_s)


def queue_ends_s(ready_s: Sequence[float], busy_s: Sequence[float]) -> list[float]:
    """When a link is done with each job, in order: max(ready, the end before) + busy (Lindley, "The theory of queues
    with a single server", 1952)."""
    end_s, ends_s = 0.0, []
    for ready, busy in zip(ready_s, busy_s, strict=True):
        end_s = max(end_s, ready) + busy
        ends_s.append(end_s)
    return ends_s


class Trip(NamedTuple):
    """What each worker moves once a cycle, and meets what others move."""

    own_s: float
    """How long it takes alone."""
    use: float
    """The part of a link's capacity that it then takes."""
    each: float
    """The part of that link which each other worker takes that is met there."""
    meets: int
    """The index of the trip that the others are at then, among all of a cycle's."""

    def expected_s(self, num_others: int, chance: float) -> float:
        """Where each other worker is at what it meets with this chance: a link that is asked for more than it can
        pass takes longer in proportion."""
        if self.use >= 1:
            return self.own_s * (1 + self.each * num_others * chance)
        counts = np.arange(num_others + 1)
        asked = np.maximum(1.0, self.use + self.each * counts)
        return self.own_s * float(asked @ _binomial(num_others, chance))


def _binomial(num: int, chance: float) -> Floats:
    """The probabilities of 0 to `num` successes."""
    if not 0 < chance < 1:
        sure: Floats = np.zeros(num + 1)
        sure[num if chance >= 1 else 0] = 1.0
        return sure
    counts = np.arange(num)
    steps = np.log((num - counts) / (counts + 1)) + math.log(chance / (1 - chance))
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    likely = np.exp(logs - logs.max())
    found: Floats = likely / likely.sum()
    return found


def asynchronous_rate(
    num_workers: int,
    *,
    cycle_s: float,
    own_s: float,
    shared_s: float,
    other: tuple[float, float] = (0.0, 0.0),
    trips: Sequence[Trip] = (),
) -> float:
    """Gradients a second of n workers that wait for nobody and share links evenly.

    Mean value analysis of a closed network of a delay and processor-sharing queues (Reiser and Lavenberg,
    "Mean-value analysis of closed multichain queuing networks", JACM 27(2), 1980): R(n) = D (1 + Q(n - 1)),
    X = n / (Z + R), Q = X R, for any distribution. Where a worker's own card takes longer than what is shared, the rest
    is a delay (Seidmann, Schweitzer and Shalev-Oren, Large Scale Systems 12, 1987).

    Args:
        cycle_s: Z, what a worker does besides its transfer: computing, latency, the update.
        own_s: its transfer, alone.
        shared_s: D, one transfer on what is shared most.
        other: both of what it then moves on something else.
        trips: what else it moves, where it depends on what others are at whether they meet: a worker finds n - 1 others
            as they are without it.
    """
    queues = ((own_s, shared_s), other)
    delay_s = cycle_s + sum(max(0.0, own - shared) for own, shared in queues)
    lengths, chances, rate = [0.0, 0.0], [0.0] * len(trips), 0.0
    for count in range(1, num_workers + 1):
        queued_s = [shared * (1 + length) for (_, shared), length in zip(queues, lengths, strict=True)]
        moved_s = [trip.expected_s(count - 1, chances[trip.meets]) for trip in trips]
        rate = count / (delay_s + sum(queued_s) + sum(moved_s))
        lengths = [rate * trip_s for trip_s in queued_s]
        chances = [rate / count * trip_s for trip_s in moved_s]
    return rate
