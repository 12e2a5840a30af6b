"""All-reduce through one rank: two rounds, and that rank's link carries everything."""

import torch
from torch import Tensor

from paceline.comm.algorithms.partial_sum import SumOrMean, as_flat
from paceline.comm.algorithms.pieces import pieces_of, start_receiving, start_sending, wait_for
from paceline.comm.base import Collective, Work
from paceline.comm.reduction import Reduction


def reduce_broadcast(collective: Collective, tensor: Tensor, *, op: SumOrMean = "mean") -> None:
    """As `AllReduceAlgorithm`; all send to rank 0, which reduces in rank order and sends the result back.

    It has the shape of MapReduce with one reducer (Dean and Ghemawat, "MapReduce: simplified data processing on large
    clusters", OSDI 2004, section 3.1). Rank 0 sends and receives n - 1 times the tensor, the others once, in 2 rounds.
    """
    flat = as_flat(tensor, op)
    if collective.rank == 0:
        _reduce(collective, flat, op)
    else:
        sending = start_sending(collective, flat, destination=0)
        # The result overwrites this rank's part, which rank 0 has taken by then.
        wait_for(start_receiving(collective, flat, source=0))
        wait_for(sending)


def _reduce(collective: Collective, flat: Tensor, op: SumOrMean) -> None:
    """Rank 0's part, piece by piece; the next piece is on its way while one is reduced."""
    others = range(1, collective.size)
    reduction = Reduction(op, flat.dtype)
    pieces = pieces_of(flat)
    sending: list[Work] = []

    def receive(piece: Tensor) -> list[tuple[Tensor, Work]]:
        parts = [torch.empty_like(piece) for _ in others]
        return [(part, collective.recv(part, source=other)) for part, other in zip(parts, others, strict=True)]

    coming = receive(pieces[0]) if pieces else []
    for number, piece in enumerate(pieces):
        here, coming = coming, receive(pieces[number + 1]) if number + 1 < len(pieces) else []
        for _, work in here:
            work.wait()
        reduction([piece, *(part for part, _ in here)], piece)
        sending.extend(collective.send(piece, destination=other) for other in others)
    wait_for(sending)
