"""All-reduce by recursive halving and doubling: the least that has to be sent, in few rounds."""

from functools import partial

import torch
from torch import Tensor

from paceline.comm.algorithms.partial_sum import PartialSum, SumOrMean, as_flat, divisor_of
from paceline.comm.algorithms.pieces import exchange, start_receiving, start_sending, wait_for
from paceline.comm.base import Collective


def halving_doubling(collective: Collective, tensor: Tensor, *, op: SumOrMean = "mean") -> None:
    """As `AllReduceAlgorithm`; pairs of ranks exchange halves of what is left, then give back what they reduced.

    This is Rabenseifner's algorithm, as in Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", International Journal of High Performance Computing Applications 19(1), 2005, section 4.5. The
    first and largest exchange is with the next rank, which is most likely to be near. Each of n = 2**k ranks sends
    2 (n - 1) / n times the tensor, in 2 log2(n) rounds. If there are more than 2**k ranks, the others first add their
    tensor to a partner's and then wait for the result: either sends one tensor more, in 2 more rounds.

    Half precision is rounded at each of the log2(n) exchanges of a sum.
    """
    flat = as_flat(tensor, op)
    rank, size = collective.rank, collective.size
    num_pairing = 1 << (size.bit_length() - 1)
    if rank >= num_pairing:
        wait_for(start_sending(collective, flat, destination=rank - num_pairing))
        wait_for(start_receiving(collective, flat, source=rank - num_pairing))
        return
    has_guest = rank + num_pairing < size
    total = PartialSum(flat)
    scratch = torch.empty_like(flat if has_guest else flat[: flat.numel() // 2 + 1])
    if has_guest:
        wait_for(start_receiving(collective, scratch, source=rank + num_pairing))
        total.add(scratch)
    given: list[tuple[int, slice, slice]] = []  # of each halving: partner, what this rank kept, what it gave up
    start, stop, distance = 0, flat.numel(), 1
    while distance < num_pairing:
        partner, middle = rank ^ distance, (start + stop) // 2
        low, high = slice(start, middle), slice(middle, stop)
        kept, gone = (low, high) if rank < partner else (high, low)
        given.append((partner, kept, gone))
        start, stop = kept.start, kept.stop
        total.store(gone.start, gone.stop)
        incoming = scratch[: stop - start]
        add = partial(total.add, shift=start)
        exchange(collective, flat[gone], destination=partner, incoming=incoming, source=partner, arrived=add)
        distance *= 2
    total.store(start, stop, divisor=divisor_of(op, size=size))
    for partner, kept, gone in reversed(given):
        exchange(collective, flat[kept], destination=partner, incoming=flat[gone], source=partner)
    if has_guest:
        wait_for(start_sending(collective, flat, destination=rank + num_pairing))
