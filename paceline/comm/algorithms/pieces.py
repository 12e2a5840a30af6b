"""Large messages in pieces, so that what has arrived is added while the rest is on its way."""

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

from paceline.comm.base import Collective, Work

# 8 MB among 4 ranks over gloo took 1.7 to 6 times as long in pieces of 256 KiB, and up to 1.7 times in 1 MiB.
PIECE_BYTES = 2**22


def chunks_of(flat: Tensor, count: int) -> list[Tensor]:
    """`count` consecutive views that differ by at most one element in length; some are empty in a short tensor."""
    bounds = [flat.numel() * index // count for index in range(count + 1)]
    return [flat[start:stop] for start, stop in pairwise(bounds)]


def pieces_of(flat: Tensor, piece_bytes: int | None = None) -> list[Tensor]:
    """Consecutive views of at most `piece_bytes` (none: `PIECE_BYTES`); no view of an empty tensor."""
    length = max(1, (piece_bytes or PIECE_BYTES) // flat.itemsize)
    return [flat[start : start + length] for start in range(0, flat.numel(), length)]


def start_sending(collective: Collective, flat: Tensor, *, destination: int) -> list[Work]:
    return [collective.send(piece, destination=destination) for piece in pieces_of(flat)]


def start_receiving(collective: Collective, flat: Tensor, *, source: int) -> list[Work]:
    return [collective.recv(piece, source=source) for piece in pieces_of(flat)]


def wait_for(works: list[Work]) -> None:
    for work in works:
        work.wait()


def exchange(
    collective: Collective,
    outgoing: Tensor,
    *,
    destination: int,
    incoming: Tensor,
    source: int,
    arrived: Callable[[Tensor, int], None] | None = None,
) -> None:
    """Send `outgoing` to one rank while `incoming` is received from another, or from the same.

    `arrived` is called with each piece of `incoming`, and the index of its first element, once it is there.
    """
    # Receives first: gloo otherwise announces them behind the data that it sends, and the two directions take turns
    # (44.7 MB at 1 Gbit/s: 0.6 s instead of 0.38 s).
    receiving = start_receiving(collective, incoming, source=source)
    sending = start_sending(collective, outgoing, destination=destination)
    start = 0
    for piece, work in zip(pieces_of(incoming), receiving, strict=True):
        work.wait()
        if arrived is not None:
            arrived(piece, start)
        start += piece.numel()
    wait_for(sending)
