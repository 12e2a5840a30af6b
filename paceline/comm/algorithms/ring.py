"""All-reduce around a ring: the least that has to be sent, in many rounds."""

import torch
from torch import Tensor

from paceline.comm.algorithms.partial_sum import PartialSum, SumOrMean, as_flat, divisor_of
from paceline.comm.algorithms.pieces import chunks_of, exchange
from paceline.comm.base import Collective


def ring(collective: Collective, tensor: Tensor, *, op: SumOrMean = "mean") -> None:
    """As `AllReduceAlgorithm`, with one chunk of the tensor for each rank.

    Every rank sends to the next one only, in a reduce-scatter and then an all-gather: 2 (n - 1) / n times the tensor,
    in 2 (n - 1) rounds (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69(2), 2009).

    Half precision is rounded at each of the n - 1 hops of a sum.
    """
    flat = as_flat(tensor, op)
    rank, size = collective.rank, collective.size
    if size == 1:
        return
    chunks = chunks_of(flat, size)
    scratch = torch.empty(max(chunk.numel() for chunk in chunks), dtype=flat.dtype, device=flat.device)
    following, previous = (rank + 1) % size, (rank - 1) % size
    for hop in range(size - 1):
        mine = chunks[(rank - hop - 1) % size]
        total = PartialSum(mine)
        exchange(
            collective,
            chunks[(rank - hop) % size],
            destination=following,
            incoming=scratch[: mine.numel()],
            source=previous,
            arrived=total.add,
        )
        total.store(divisor=divisor_of(op, size=size) if hop == size - 2 else 1)
    for hop in range(size - 1):
        outgoing, incoming = chunks[(rank + 1 - hop) % size], chunks[(rank - hop) % size]
        exchange(collective, outgoing, destination=following, incoming=incoming, source=previous)
