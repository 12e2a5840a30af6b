"""All-reduce by direct exchange: the least that has to be sent, in two rounds, over links between all ranks."""

import torch
from torch import Tensor

from paceline.comm.algorithms.partial_sum import SumOrMean, as_flat
from paceline.comm.algorithms.pieces import chunks_of, pieces_of, start_receiving, start_sending, wait_for
from paceline.comm.base import Collective, Work
from paceline.comm.reduction import Reduction


def all_to_all(collective: Collective, tensor: Tensor, *, op: SumOrMean = "mean") -> None:
    """As `AllReduceAlgorithm`; every rank gets everyone's part for it, reduces in rank order, sends the result back.

    This is the pairwise exchange of Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", International Journal of High Performance Computing Applications 19(1), 2005, section 4.4, but
    with all pairs at once, followed by a direct all-gather. Every rank sends 2 (n - 1) / n times the tensor, in 2
    rounds of n - 1 messages each.
    """
    flat = as_flat(tensor, op)
    rank, size = collective.rank, collective.size
    if size == 1:
        return
    chunks = chunks_of(flat, size)
    mine = chunks[rank]
    parts = [torch.empty_like(mine) for _ in range(size)]
    parts[rank].copy_(mine)
    others = [(rank + distance) % size for distance in range(1, size)]  # so that not all send to one rank first
    # Receives first, as in `exchange`. A result overwrites the part that its sender has taken by then.
    arriving = [start_receiving(collective, parts[other], source=other) for other in others]
    returning = [work for other in others for work in start_receiving(collective, chunks[other], source=other)]
    sending: list[Work] = []
    for other in others:
        sending += start_sending(collective, chunks[other], destination=other)
    reduction = Reduction(op, flat.dtype)
    for number, piece in enumerate(pieces_of(mine)):
        for works in arriving:
            works[number].wait()
        reduction([pieces_of(part)[number] for part in parts], piece)
        sending.extend(collective.send(piece, destination=other) for other in others)
    wait_for(returning)
    wait_for(sending)
