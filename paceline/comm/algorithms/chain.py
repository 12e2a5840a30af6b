"""Broadcast along a chain of ranks: every link carries the tensor once each way, however many ranks there are."""

from torch import Tensor

from paceline.comm.algorithms.pieces import pieces_of, wait_for
from paceline.comm.base import Collective, Work

# The last rank has everything as many pieces later than the next one as ranks lie between them: 44.7 MB to 8 hosts at
# 100 Mbit/s took 4.7 s in pieces of 1 MiB and 4.6 s in these, and half of them gained no more.
PIECE_BYTES = 2**19


def is_worth_a_chain(num_bytes: float, *, size: int) -> bool:
    """Whether there are pieces enough to keep a chain's links busy; fewer come sooner down a tree."""
    return num_bytes >= size * PIECE_BYTES


def chain(collective: Collective, flat: Tensor, *, root: int) -> None:
    """Overwrite the contiguous 1-D `flat` with the root's; every rank passes each piece on to the next one.

    The last rank of n has M bytes after (M + (n - 2) p) / B in pieces of p bytes, over links of B bytes/s; a binomial
    tree takes log2(n) M / B. It is the pipeline of Pjesivac-Grbovic et al., "Performance analysis of MPI collective
    operations", Cluster Computing 10(2), 2007. Ranks of one host should follow one another, so that no link carries the
    tensor twice.

    Uses nothing of the collective but `rank`, `size`, `send` and `recv`, and raises what those raise.
    """
    rank, size = collective.rank, collective.size
    pieces = pieces_of(flat, PIECE_BYTES)
    receiving = [] if rank == root else [collective.recv(piece, source=(rank - 1) % size) for piece in pieces]
    following = (rank + 1) % size
    sending: list[Work] = []
    for number, piece in enumerate(pieces):
        if receiving:
            receiving[number].wait()
        if following != root:
            sending.append(collective.send(piece, destination=following))
    wait_for(sending)
