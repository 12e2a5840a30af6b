"""All-reduce that hands whole tensors round a ring, as introductions draw it: what dividing them saves can be seen."""

import torch
from torch import Tensor

from paceline.comm.algorithms.partial_sum import SumOrMean, as_flat
from paceline.comm.algorithms.pieces import exchange
from paceline.comm.base import Collective
from paceline.comm.reduction import Reduction


def naive_ring(collective: Collective, tensor: Tensor, *, op: SumOrMean = "mean") -> None:
    """As `AllReduceAlgorithm`; each rank passes on what it got in the hop before, and reduces all in rank order.

    Every rank sends n - 1 times the tensor, in n - 1 rounds, and holds n of them. `ring` sends less than two.
    """
    flat = as_flat(tensor, op)
    rank, size = collective.rank, collective.size
    if size == 1:
        return
    parts = [torch.empty_like(flat) for _ in range(size)]
    parts[rank].copy_(flat)
    following, previous = (rank + 1) % size, (rank - 1) % size
    for hop in range(size - 1):
        outgoing, incoming = parts[(rank - hop) % size], parts[(rank - hop - 1) % size]
        exchange(collective, outgoing, destination=following, incoming=incoming, source=previous)
    Reduction(op, flat.dtype)(parts, flat)
